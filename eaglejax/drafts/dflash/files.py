"""DFlash checkpoints: the flat form of its authors and SpecForge, and that of vLLM's speculators.

The first names blocks of the target whose output is meant (``target_layer_ids``: id i is boundary i + 1), the
second boundaries (``aux_hidden_state_layer_ids``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.files import write_text
from eaglejax.checkpoint.hf import MARKER as KEY
from eaglejax.checkpoint.hf import PLAIN_DTYPES
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.checkpoint.tables import COPY, TRANSPOSE, Rule, candidates, check_layers, materialize, plan
from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.model import DFlashParams, Weights, param_table
from eaglejax.drafts.files import DraftFiles, TensorFile
from eaglejax.drafts.rope_settings import rope_to_hf
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.target import Target
from eaglejax.nn import rope as rope_lib
from eaglejax.pytree import leaf_paths, unflatten

_LAYER, _ATTENTION, _MLP = "layers.{l}.", "layers.{l}.self_attn.", "layers.{l}.mlp."
RULES: list[Rule] = [
    Rule("fc", "fc.weight", TRANSPOSE),
    Rule("context_norm", "hidden_norm.weight", COPY),
    Rule("norm", "norm.weight", COPY),
    Rule("mask", "mask_embedding", COPY),
    Rule("embed", "embed_tokens.weight", COPY),
    Rule("head", "lm_head.weight", TRANSPOSE),
    Rule(_LAYER + "attn_norm", _LAYER + "input_layernorm.weight", COPY),
    Rule(_LAYER + "mlp_norm", _LAYER + "post_attention_layernorm.weight", COPY),
    *(Rule(_LAYER + x, f"{_ATTENTION}{x}_proj.weight", TRANSPOSE) for x in "qkvo"),
    *(Rule(f"{_LAYER}{x}_bias", f"{_ATTENTION}{x}_proj.bias", COPY) for x in "qkvo"),
    *(Rule(f"{_LAYER}{x}_norm", f"{_ATTENTION}{x}_norm.weight", COPY) for x in "qk"),
    *(Rule(_LAYER + x, f"{_MLP}{x}_proj.weight", TRANSPOSE) for x in ("gate", "up", "down")),
]
IGNORABLE = (r"verifier_lm_head\.weight", r"verifier_norm\.weight", r".*rotary_emb\.inv_freq")
_WRAPPERS = re.compile(r"^(?:(?:model|module|draft_model|draft)\.)+")
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class _Store:
    """The tensors under plain names."""

    def __init__(self, file: TensorFile, where: Path) -> None:
        self._file = file
        self.stored: dict[str, str] = {}
        for name in file.names():
            plain = _WRAPPERS.sub("", name)
            if plain in self.stored:
                raise CheckpointError(
                    f"{where} holds {plain} twice: as {self.stored[plain]!r} and as {name!r}; keep one"
                )
            self.stored[plain] = name

    def names(self) -> Collection[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self.stored[name])

    def dtype(self, name: str) -> np.dtype:
        return self._file.dtype(self.stored[name])

    def array(self, name: str) -> np.ndarray:
        return self._file.array(self.stored[name])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._file.rows(self.stored[name], start, stop)


@dataclasses.dataclass(frozen=True)
class DFlashFile:
    """An understood draft; ``form``: one of ``methods.FORM_NAMES``."""

    path: Path
    form: str
    config: DFlashConfig
    store: _Store
    raw: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    ids: None = None


def read_file(files: DraftFiles) -> DFlashFile:
    """Understand a draft. Raises CheckpointError or ConfigError that names what is wrong."""
    raw, where = files.raw, files.path
    store = _Store(files.tensors, where)
    speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
    layer = raw.get("transformer_layer_config") if speculators else raw
    inner = raw.get("dflash_config") or {}
    if not isinstance(layer, Mapping) or not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: transformer_layer_config and dflash_config must be objects")
    said = {**layer, **raw, **inner}
    notes: list[str] = []

    def whole(key: str, least: int = 1) -> int:
        value = said.get(key)
        if type(value) is not int or value < least:
            raise CheckpointError(
                f"{where}: {key} is {value!r:.80}; a DFlash draft needs an integer from {least}"
            )
        return value

    for name in ("d2t", "t2d"):
        if name in store.names():
            raise CheckpointError(
                f"{where} holds {name}: DFlash drafts with a reduced vocabulary are not read"
            )
    if inner.get("projector_type") not in (None, "dflash"):
        raise CheckpointError(
            f"{where}: dflash_config.projector_type is {inner['projector_type']!r:.80}, a draft that goes on "
            "from DFlash and is not run"
        )
    if said.get("block_size") is None:
        raise CheckpointError(f"{where} says no block_size: how many tokens a block guesses is not known")
    mask_vector = "mask_embedding" in store.names()
    if said.get("mask_token_id") is None and not mask_vector:
        raise CheckpointError(
            f"{where} has neither mask_token_id nor mask_embedding, one of which stands for unknown tokens"
        )
    mask_id = 0 if mask_vector and said.get("mask_token_id") is None else whole("mask_token_id", 0)
    hidden, count = whole("hidden_size"), whole("num_hidden_layers")
    check_layers(store.names(), count, str(where))
    heads = whole("num_attention_heads")
    windows = _windows(said, count, where)
    act = said.get("hidden_act", "silu")
    if act not in _ACTIVATIONS:
        raise CheckpointError(f"{where}: activation {act!r:.80} is not supported")
    if not _names_theta(layer):
        notes.append("config.json names no rope_theta; 1000000 is taken, as vLLM does")
    target_hidden = said.get("target_hidden_size") or hidden
    block = raw.get(KEY) if isinstance(raw.get(KEY), Mapping) else {}
    assert isinstance(block, Mapping)
    config = DFlashConfig(
        vocab_size=whole("vocab_size"),
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or hidden // heads,
        num_layers=count,
        aux=_boundaries(said, speculators, where),
        block=whole("block_size"),
        mask_id=mask_id,
        mask_vector=mask_vector,
        from_anchor=bool(said.get("sample_from_anchor")),
        norm_eps=float(said.get("rms_norm_eps", 1e-6)),
        rope=rope_lib.from_hf(layer, default_theta=1e6),
        activation=_ACTIVATIONS[act],
        qk_norm="layers.0.self_attn.q_norm.weight" in store.names(),
        attention_bias=bool(said.get("attention_bias")),
        windows=windows,
        causal=_causal(said, windows, speculators),
        own_embedding="embed_tokens.weight" in store.names(),
        own_head="lm_head.weight" in store.names(),
        basis=block.get("basis"),
    )
    file = DFlashFile(where, "speculators" if speculators else "dflash", config, store, raw, tuple(notes))
    _check(file)
    return file


def _names_theta(layer: Mapping[str, Any]) -> bool:
    sections = [layer, layer.get("rope_parameters"), layer.get("rope_scaling")]
    return any(isinstance(s, Mapping) and s.get("rope_theta") is not None for s in sections)


def _boundaries(said: Mapping[str, Any], speculators: bool, where: Path) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = said.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{where}: {key} is {ids!r:.80}; it must list the target's layers that fc fuses"
        )
    return tuple(i if speculators else i + 1 for i in ids)


def _windows(said: Mapping[str, Any], count: int, where: Path) -> tuple[int | None, ...]:
    types = said.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != count):
        raise CheckpointError(f"{where}: layer_types is {types!r:.80} for {count} layers")
    slides = [t == "sliding_attention" for t in types or ()] or [False] * count
    if said.get("use_swa") and not any(slides):
        slides = [True] * count
    if not any(slides):
        return ()
    window = said.get("swa_window_size") or said.get("sliding_window")
    if type(window) is not int or window < 1:
        raise CheckpointError(f"{where}: sliding layers need a sliding_window, which is {window!r:.80}")
    return tuple(window if s else None for s in slides)


def _causal(said: Mapping[str, Any], windows: tuple[int | None, ...], speculators: bool) -> tuple[bool, ...]:
    """Sliding layers do not look ahead in a block unless the config says so; the others do."""
    override = said.get("causal", said.get("is_causal"))
    if speculators and said.get("sliding_window_non_causal"):
        override = False
    if override is not None:
        return (True,) * int(said["num_hidden_layers"]) if override else ()
    return tuple(w is not None for w in windows)


def _check(file: DFlashFile) -> None:
    config, store = file.config, file.store
    if "fc.weight" in store.names():
        width = store.shape("fc.weight")[1]
        right = len(config.aux) * config.target_hidden_size
        if width != right:
            raise CheckpointError(
                f"{file.path}: fc reads {width} numbers, and the {len(config.aux)} target layers that "
                f"config.json names have {right}"
            )
    assignments = plan(param_table(config), RULES, store, where=str(file.path), ignorable=IGNORABLE)
    for assignment in assignments:
        for name in assignment.names:
            if store.dtype(name).name not in PLAIN_DTYPES:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is {store.dtype(name).name}; drafts are read as "
                    f"{', '.join(PLAIN_DTYPES)}"
                )


def read_weights(file: DFlashFile, dtype: Any) -> Weights:
    """The draft's own weights in ``dtype``."""
    table = param_table(file.config, dtype)
    assignments = plan(table, RULES, file.store, where=str(file.path), ignorable=IGNORABLE)
    return unflatten(table, {a.leaf: jnp.asarray(materialize(a, file.store)) for a in assignments})


def join(config: DFlashConfig, weights: Weights, target: Target) -> DFlashParams:
    """Weights with what they borrow of ``target``: the same arrays, not copies."""
    head, tied = target_head(target)
    return DFlashParams(
        weights=weights,
        embed=None if config.own_embedding else target.params["embed"],
        head=None if config.own_head else head,
        tied=tied and not config.own_head,
    )


def write_weights(
    out: Path,
    config: DFlashConfig,
    weights: Weights,
    *,
    to: str = "dflash",
    source: Mapping[str, Any] | None = None,
    verifier: str | None = None,
) -> list[str]:
    """Write a draft to the new folder ``out`` in one of ``methods.FORM_NAMES``. Raises ConfigError for a
    folder that is not empty."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name a new folder")
    infos = leaf_paths(param_table(config))
    tensors: dict[str, Pending] = {}
    for (leaf, info), value in zip(infos.items(), jax.tree.leaves(weights), strict=True):
        found = next(iter(candidates(leaf, info, RULES)))
        stored = np.asarray(value).T if found.layout.transposed else np.asarray(value)
        stored = np.ascontiguousarray(stored)
        tensors[found.names[0]] = Pending(stored.shape, stored.dtype, functools.partial(np.asarray, stored))
    dtype = tensors["fc.weight"].dtype.name
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", tensors, {"format": "pt"})
    document = _document(config, to, dtype, source or {}, verifier)
    write_text(out / "config.json", json.dumps(document, indent=2) + "\n")
    return []


def _document(
    config: DFlashConfig, to: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    kept = {k: source[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in source}
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": names[config.activation],
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.rope.max_position,
        "tie_word_embeddings": False,
        **rope_to_hf(config.rope),
        **kept,
    }
    if any(config.windows):
        layer["sliding_window"] = next(w for w in config.windows if w)
        layer["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
    causal = [not config.looks_ahead(i) for i in range(config.num_layers)]
    if len(set(causal)) > 1 and causal != [w is not None for w in config.windows]:
        raise ConfigError(f"the {to} form cannot say of these layers which of them look ahead in a block")
    usual = causal == [w is not None for w in config.windows] or not any((*causal, *config.windows))
    block = {} if config.basis is None else {KEY: {"basis": config.basis}}
    mask = {} if config.mask_vector else {"mask_token_id": config.mask_id}
    if config.target_hidden_size != config.hidden_size:
        layer["target_hidden_size"] = config.target_hidden_size
    if to == "speculators":
        if not usual and causal[0]:
            raise ConfigError("the speculators form has no full layers that do not look ahead in a block")
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "speculators_version": source.get("speculators_version") or "0.4.0",
            "torch_dtype": dtype,
            "block_size": config.block,
            "aux_hidden_state_layer_ids": list(config.aux),
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not usual,
            **mask,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block - 1}],
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            **block,
        }
    if 0 in config.aux:
        raise ConfigError(
            "the dflash form counts blocks of the target, and this draft reads the embedding (boundary 0)"
        )
    inner: dict[str, Any] = {"target_layer_ids": [i - 1 for i in config.aux], **mask}
    inner |= {} if usual else {"causal": causal[0]}
    inner |= {"sample_from_anchor": True} if config.from_anchor else {}
    return {
        "architectures": ["DFlashDraftModel"],
        **layer,
        "torch_dtype": dtype,
        "block_size": config.block,
        "dflash_config": inner,
        **block,
    }
