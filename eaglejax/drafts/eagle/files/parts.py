"""Which optional parts a draft has: what its tensors show, held against what its config.json promises.

A lost tensor leaves a smaller draft that loads as well and guesses worse, so nothing is switched off by mere
absence: eaglejax's own form records every optional part, and the keys of the other forms say what their
readers would look for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eaglejax.drafts.eagle.config import AuxNorm
from eaglejax.drafts.eagle.files.keys import check_keys
from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.shapes import Shapes
from eaglejax.models.config_reader import ELSEWHERE

_LAYER = r"layers\.\d+\."
_SWITCHES: dict[str, tuple[str, str]] = {
    # setting: (pattern of its tensors, one of them)
    "fc_bias": (r"fc\.bias", "fc.bias"),
    "qkv_bias": (_LAYER + r"self_attn\.[qkv]_proj\.bias", "layers.0.self_attn.q_proj.bias"),
    "o_bias": (_LAYER + r"self_attn\.o_proj\.bias", "layers.0.self_attn.o_proj.bias"),
    "qk_norm": (_LAYER + r"self_attn\.[qk]_norm\.weight", "layers.0.self_attn.q_norm.weight"),
    "own_embedding": (r"embed_tokens\.weight", "embed_tokens.weight"),
    "feature_map": (r"feature_map\.weight", "feature_map.weight"),
}


def switches(file: Shapes, version: int) -> dict[str, bool]:
    """The settings of ``EagleConfig`` that a tensor's presence means. Raises CheckpointError where the file
    lacks a part that its config.json records or implies, or holds one that it rules out."""
    found = {
        name: any(re.fullmatch(pattern, n) for n in file.store.names())
        for name, (pattern, _) in _SWITCHES.items()
    }
    check_keys(file)
    check_foreign(file)
    for name, present in found.items():
        recorded = file.settings.get(name)
        if recorded is not None and recorded != present:
            file.fail(
                f"config.json records {KEY}.{name}: {str(recorded).lower()}, but the file "
                f"{'holds' if present else 'lacks'} {_SWITCHES[name][1]}; "
                + ("a tensor was lost" if recorded else "it is not of this draft")
            )
    for key, says, names in _promises(file, version, found):
        if says is not None and not isinstance(says, bool):
            file.fail(f"{key} is {says!r}; it must be true or false")
        for name in names:
            if says and not found[name]:
                what = f"that fc has a bias ({key}: true)" if name == "fc_bias" else f"{key}: true"
                file.fail(
                    f"config.json says {what}, but there is no {_SWITCHES[name][1]}; a tensor was lost, or "
                    "the key is wrong"
                )
            if says is False and found[name]:
                file.notes.append(
                    f"{_SWITCHES[name][1]} is in the file and is used, although config.json says {key}: false"
                )
    if file.layer.get("mlp_bias") is True:
        file.fail("config.json says mlp_bias: true; the MLP of drafts here has no biases")
    return found


_SCALES = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
    *("lm_head_multiplier", "scale_emb", "scale_depth", "attn_logit_softcapping", "final_logit_softcapping"),
    *("clip_qkv", "alibi", "rope_interleave", "rope_interleaved", "rotary_pct", "rope_ratio", "qk_layernorm"),
)
"""Keys of other families whose readers compute with them in whatever layer they find."""


def check_foreign(file: Shapes) -> None:
    """Refuse, or name in a note, settings of other families that no draft here computes with. Raises
    CheckpointError."""
    for key, values in ELSEWHERE.items():
        value = file.layer.get(key)
        if value is None or value in values or key in ("use_qk_norm", "hidden_activation"):
            continue
        if key in _SCALES:
            file.fail(f"config.json says {key}: {value!r:.80}, which drafts here do not compute with")
        if key != "query_pre_attn_scalar" or value != file.layer.get("head_dim"):
            file.notes.append(f"config.json says {key}: {value!r:.80}, which drafts here do not read")
    window = file.layer.get("sliding_window")
    if window and not file.layer.get("layer_types") and file.layer.get("use_sliding_window") is not False:
        file.notes.append(
            f"config.json says sliding_window: {window!r:.80}, but no layer_types that say which layers "
            "slide; none does"
        )


def _promises(
    file: Shapes, version: int, found: Mapping[str, bool]
) -> list[tuple[str, Any, tuple[str, ...]]]:
    """(key of config.json, what it says, the parts that it means)."""
    raw, layer = file.raw, file.layer
    # SafeAILab's own loader gives EAGLE-1's fc a bias by this key and passes over it in EAGLE-3, and it knows
    # attention biases as qkv_bias alone.
    official = not file.speculators and raw.get("architectures") in (["LlamaForCausalLM"], None)
    out: list[tuple[str, Any, tuple[str, ...]]] = []
    if version == 1 or not official:
        key = "bias" if raw.get("bias") is not None else "eagle_fc_bias"
        out.append((key, raw.get(key), ("fc_bias",)))
    if not official:
        out.append(("attention_bias", layer.get("attention_bias"), ("qkv_bias", "o_bias")))
    out.append(("fusion_bias", raw.get("fusion_bias"), ("fc_bias",)))
    out.append(("qkv_bias", layer.get("qkv_bias"), ("qkv_bias",)))
    out.append(("use_qk_norm", layer.get("use_qk_norm"), ("qk_norm",)))
    if file.speculators:
        nested = raw.get("transformer_layer_config")
        if isinstance(nested, Mapping) and nested.get("model_type") == "qwen3" and not found["qk_norm"]:
            file.fail(
                "transformer_layer_config.model_type is qwen3, whose layers norm queries and keys, but there "
                f"is no {_SWITCHES['qk_norm'][1]}"
            )
        if raw.get("embed_requires_grad") is True:
            out.append(("embed_requires_grad", True, ("own_embedding",)))
    return out


def feature_norm(file: Shapes, fc_in: int) -> tuple[AuxNorm, int]:
    """(what is normalised before ``fc`` of ``fc_in`` rows, how many norms of one feature each there are)."""
    numbers = sorted(
        int(m[1]) for n in file.store.names() if (m := re.fullmatch(r"fc_norm\.(\d{1,9})\.weight", n))
    )
    joined = file.has("input_norm.weight")
    for flag, present, tensor in (
        ("norm_before_fc", joined, "input_norm.weight"),
        ("fc_norm", bool(numbers), "fc_norm.0.weight"),
    ):
        stated = file.flag(flag)
        if stated and not present:
            file.fail(f"config.json sets {flag}, but there is no {tensor}")
        if stated is False and present:
            file.fail(f"config.json says {flag}: false, but the file holds {tensor}; one of them is wrong")
    if joined and numbers:
        file.fail("it holds both input_norm and fc_norm; a draft normalises its features one way")
    found: AuxNorm = "each" if numbers else "joined" if joined else "none"
    recorded = file.settings.get("aux_norm", found)
    if recorded != found:
        tensor = "fc_norm.0.weight" if "each" in (recorded, found) else "input_norm.weight"
        file.fail(
            f"config.json records {KEY}.aux_norm: {recorded!r}, but the file "
            f"{'holds' if recorded == 'none' else 'lacks'} {tensor}"
        )
    if numbers:
        width = file.store.shape(f"fc_norm.{numbers[0]}.weight")[0]
        if fc_in % width == 0 and numbers != list(range(fc_in // width)):
            lost = sorted(set(range(fc_in // width)) - set(numbers))
            file.fail(
                f"lacks fc_norm.{lost[0]}.weight: fc reads {fc_in // width} features of {width}"
                if lost
                else f"it holds fc_norm.{numbers[-1]}.weight, but fc reads {fc_in // width} features"
            )
    return found, len(numbers)


def vocabulary_map(file: Shapes) -> None:
    """Hold the tensors of the vocabulary map against the record. Raises CheckpointError."""
    recorded = file.settings.get("map")
    if recorded is None:
        return
    for name in ("d2t", "t2d"):
        if (name in recorded) != file.has(name):
            file.fail(
                f"config.json records {KEY}.map: {recorded}, but the file "
                f"{'holds' if file.has(name) else 'lacks'} {name}"
            )
