"""Tiny EAGLE checkpoints as each producer writes them, from one set of weights, by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from eaglejax.drafts.eagle.files.read import DraftFile, read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_file, write_draft
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target, random_target
from eaglejax.nn.rope import RopeConfig

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], None]
V, VD, H, HEADS, KV, HD, F = 40, 24, 16, 4, 2, 4, 20


@dataclasses.dataclass(frozen=True)
class Made:
    """Tensors by plain name in [out, in] form, and the target id of each draft id."""

    tensors: dict[str, np.ndarray]
    ids: np.ndarray


def make(
    version: int = 3,
    *,
    vd: int = VD,
    ht: int = H,
    aux: int = 3,
    head_dim: int = HD,
    layers: int = 1,
    seed: int = 0,
    dtype: Any = np.float32,
) -> Made:
    rng = np.random.default_rng(seed)

    def m(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / 4).astype(dtype)

    out: dict[str, np.ndarray] = {"fc.weight": m(H, 2 * H if version == 1 else aux * ht)}
    for i in range(layers):
        wide = 2 * H if version == 3 and i == 0 else H
        at = f"layers.{i}."
        out |= {
            at + "self_attn.q_proj.weight": m(HEADS * head_dim, wide),
            at + "self_attn.k_proj.weight": m(KV * head_dim, wide),
            at + "self_attn.v_proj.weight": m(KV * head_dim, wide),
            at + "self_attn.o_proj.weight": m(H, HEADS * head_dim),
            at + "mlp.gate_proj.weight": m(F, H),
            at + "mlp.up_proj.weight": m(F, H),
            at + "mlp.down_proj.weight": m(H, F),
            at + "post_attention_layernorm.weight": m(H) + dtype(1),
        }
        if version == 3 or i > 0:
            out[at + "input_layernorm.weight"] = m(H) + dtype(1)
        if version == 3 and i == 0:
            out[at + "hidden_norm.weight"] = m(H) + dtype(1)
    if version == 1:
        out |= {"fc.bias": m(H), "embed_tokens.weight": m(V, H)}
    else:
        out |= {"norm.weight": m(H) + dtype(1), "lm_head.weight": m(vd, H)}
    return Made(out, np.sort(rng.choice(V, vd, replace=False)))


def maps(made: Made, *, t2d: bool = True) -> dict[str, np.ndarray]:
    member = np.zeros(V, bool)
    member[made.ids] = True
    out = {"d2t": (made.ids - np.arange(len(made.ids))).astype(np.int64)}
    return out | ({"t2d": member} if t2d else {})


def rename(tensors: Mapping[str, np.ndarray], change: Callable[[str], str]) -> dict[str, np.ndarray]:
    return {change(name): value for name, value in tensors.items()}


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


FLAT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FLAT1 = {k: v for k, v in FLAT.items() if k != "draft_vocab_size"}


def speculators_config(**top: Any) -> dict[str, Any]:
    layer = {k: v for k, v in FLAT.items() if k not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "some/target", "architectures": []},
        },
        "transformer_layer_config": {**layer, "rope_theta": 10000.0, "head_dim": HD},
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        **top,
    }


def save(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, form: str = "safetensors"
) -> Path:
    """``form``: "safetensors", "bin" (written by PyTorch) or "sharded"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if form == "safetensors":
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    elif form == "sharded":
        names = sorted(tensors)
        weight_map = {}
        for i, part in enumerate((names[::2], names[1::2])):
            file = f"model-{i + 1:05}-of-00002.safetensors"
            safetensors.numpy.save_file({n: tensors[n] for n in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        import torch

        torch.save({n: to_torch(v) for n, v in tensors.items()}, folder / "pytorch_model.bin")
    return folder


def to_torch(value: np.ndarray) -> Any:
    import torch

    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


@functools.cache
def small_target(tie: bool = False, **changes: Any) -> Target:
    """A target that the drafts made here fit."""
    config = ModelConfig(
        family="llama",
        vocab_size=V,
        hidden_size=H,
        intermediate_size=20,
        num_layers=7,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_position=64,
        rope=RopeConfig(),
        query_scale=8**-0.5,
        tie_embeddings=tie,
    )
    return random_target(dataclasses.replace(config, **changes), seed=3)


def convert(folder: Path, out: Path, to: Any, **options: Any) -> DraftFile:
    """The draft in ``folder``, written in another form and read back."""
    file = read_draft(folder)
    write_draft(out, file.config, tensors_of_file(file), file.ids, to=to, source=file.raw, **options)
    return read_draft(out)


MADE = make()
"""An EAGLE-3 draft with a small vocabulary."""


def draft(
    tmp_path: Path,
    change: Change | None = None,
    config: dict[str, Any] | None = None,
    made: Made = MADE,
    with_maps: bool = True,
) -> Path:
    """``made`` as a folder in the form of its authors, its tensors changed first."""
    tensors = rename(made.tensors, midlayer) | (maps(made) if with_maps else {})
    if change:
        change(tensors)
    return save(tmp_path / "draft", tensors, FLAT if config is None else config)


def drop(*names: str) -> Change:
    """Tensors that are missing."""

    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def put(**values: np.ndarray) -> Change:
    """Tensors that are added or replaced; two underscores stand for a dot."""

    def change(tensors: Tensors) -> None:
        tensors |= {k.replace("__", "."): v for k, v in values.items()}

    return change
