"""Understanding an EAGLE checkpoint: from tensors and a config.json to an ``EagleConfig``.

Shapes come from the tensors, because published configs are wrong about them (layer counts, head sizes,
vocabularies); the config is asked only for what no shape can tell: head counts, rotary settings, norm order,
feature layers. Every choice that a reader could doubt is kept as a note.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from eaglejax.checkpoint.eagle_names import PlainStore, open_draft
from eaglejax.checkpoint.eagle_settings import KEY, read_settings
from eaglejax.checkpoint.eagle_vocabulary import rising, target_ids
from eaglejax.checkpoint.files import read_json
from eaglejax.drafts.eagle_config import AuxNorm, EagleConfig
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.nn import rope

AuxConvention = Literal["auto", "boundary", "block"]
"""What layer ids in a file count: hidden-state boundaries (0 = embedding), or blocks whose output is meant
(id + 1)."""

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128},
}
"""What nested layer configs of these model types leave out when saved, because it is their class's
default."""


@dataclasses.dataclass(frozen=True)
class DraftFile:
    """A draft checkpoint as understood.

    ``store``: its tensors by plain name; ``raw``: its config.json; ``ids`` [Vd] int64: target id of each
    draft id, or None when they are the same; ``layout``: which producer's form it has; ``unused``: tensors
    that the configuration switches off; ``notes``: choices made, one sentence each.
    """

    path: Path
    config: EagleConfig
    store: PlainStore
    raw: Mapping[str, Any]
    ids: np.ndarray | None
    layout: str
    unused: tuple[str, ...]
    notes: tuple[str, ...]


def read_draft(
    folder: Path,
    *,
    aux_convention: AuxConvention = "auto",
    aux: tuple[int, ...] | None = None,
    method: Literal["auto", "eagle1", "eagle3"] = "auto",
) -> DraftFile:
    """Understand the checkpoint in ``folder``.

    ``aux_convention`` says what layer ids in its config count; ``aux`` replaces them by boundaries.
    ``method``: refuse a checkpoint of the other kind. Raises CheckpointError or ConfigError that names what
    is missing, contradictory or not an EAGLE draft.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{folder} holds quantised weights, which are not read; use the unquantised draft"
        )
    store = open_draft(folder)
    return _Reader(folder, raw, store).read(aux_convention, aux, method)


class _Reader:
    """One pass over a checkpoint; collects notes on the way."""

    def __init__(self, folder: Path, raw: Mapping[str, Any], store: PlainStore) -> None:
        self.folder, self.raw, self.store = folder, raw, store
        self.notes: list[str] = []
        self.settings = read_settings(raw)
        nested = raw.get("transformer_layer_config")
        self.speculators = any(
            k in raw for k in ("speculators_config", "speculators_model_type", "transformer_layer_config")
        )
        if self.speculators and not isinstance(nested, Mapping):
            self._fail("config.json is of the speculators form but has no transformer_layer_config")
        self.layer: Mapping[str, Any] = raw
        if isinstance(nested, Mapping):
            kind = nested.get("model_type", "qwen3")
            if kind not in _NESTED_DEFAULTS:
                self._fail(
                    f"transformer_layer_config.model_type {kind!r} is not supported; llama and qwen3 are"
                )
            self.layer = {**_NESTED_DEFAULTS[kind], **{k: v for k, v in nested.items() if v is not None}}

    def _fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self.folder}: {text}")

    def _has(self, name: str) -> bool:
        return name in self.store.names()

    def _matrix(self, name: str) -> tuple[int, int]:
        if not self._has(name):
            self._fail(
                f"lacks {name}, which every EAGLE draft has; it holds {_some(sorted(self.store.names()))}"
            )
        shape = self.store.shape(name)
        if len(shape) != 2:
            self._fail(f"{name} has shape {shape}; it must be a matrix")
        return shape[0], shape[1]

    def _flag(self, name: str, default: bool | None = None) -> bool | None:
        """A boolean that stands at the top, in ``eagle_config`` or in eaglejax's own block."""
        inner = self.raw.get("eagle_config")
        places = [self.raw, self.settings, *([inner] if isinstance(inner, Mapping) else [])]
        found = {p[name] for p in places if p.get(name) is not None}
        if len(found) > 1:
            self._fail(f"config.json says {name} twice and differently")
        value = found.pop() if found else default
        if value is not None and not isinstance(value, bool):
            self._fail(f"{name} is {value!r}; it must be true or false")
        return value

    def _whole(self, key: str) -> int | None:
        value = self.layer.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._fail(f"{key} is {value!r}; it must be a positive integer")
        return value

    def read(self, convention: AuxConvention, override: tuple[int, ...] | None, method: str) -> DraftFile:
        if any(re.search(r"\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.", n) for n in self.store.names()):
            self._fail(
                "its attention is multi-head latent attention (DeepSeek form), which drafts here do not have"
            )
        query, out = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"
        (q_out, wide), (hidden, o_in) = self._matrix(query), self._matrix(out)
        if o_in != q_out:
            self._fail(f"{out} reads {o_in} values but {query} makes {q_out}")
        if wide not in (hidden, 2 * hidden):
            self._fail(f"{query} reads {wide} values; EAGLE-1 reads {hidden} (H), EAGLE-3 {2 * hidden} (2H)")
        version = 3 if wide == 2 * hidden else 1
        if method != "auto" and method != f"eagle{version}":
            raise ConfigError(
                f"{self.folder} holds an EAGLE-{version} draft (its first layer reads {wide} values, "
                f"H is {hidden}); it cannot run as {method}"
            )
        if self._whole("hidden_size") not in (None, hidden):
            self._fail(
                f"config.json says hidden_size {self._whole('hidden_size')}, the tensors have {hidden}"
            )
        fc_out, fc_in = self._matrix("fc.weight")
        if fc_out != hidden:
            self._fail(f"fc.weight makes {fc_out} values, the layers read {hidden}")
        heads = self._heads(q_out)
        vocab, draft_vocab, ids = self._vocabulary(hidden)
        shared: dict[str, Any] = {
            "version": version,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab,
            "hidden_size": hidden,
            **self._mlp(),
            **heads,
            "num_layers": self._layers(),
            "norm_eps": float(self.layer.get("rms_norm_eps") or 1e-6),
            "rope": self._rope(),
            "activation": self._activation(),
            "fc_bias": self._has("fc.bias"),
            "qkv_bias": any(self._has(f"layers.0.self_attn.{x}_proj.bias") for x in "qkv"),
            "o_bias": self._has("layers.0.self_attn.o_proj.bias"),
            "qk_norm": any(self._has(f"layers.0.self_attn.{x}_norm.weight") for x in "qk"),
            "own_embedding": self._has("embed_tokens.weight"),
            "own_head": self._has("lm_head.weight"),
            "target_rows": self.settings.get("head") == "target_rows",
            "embed_scale": self.settings.get("embed_scale"),
            "softcap": self.settings.get("softcap"),
            "basis": self.settings.get("basis"),
            "feature_map": self._has("feature_map.weight"),
        }
        unused: tuple[str, ...] = ()
        if version == 1:
            if fc_in != 2 * hidden:
                self._fail(f"fc.weight reads {fc_in} values; an EAGLE-1 draft's reads {2 * hidden}")
            stated = self.raw.get("bias", self.raw.get("eagle_fc_bias"))
            if stated is True and not shared["fc_bias"]:
                self._fail("config.json says that fc has a bias, but there is no fc.bias")
            if shared["fc_bias"] and stated is False:
                self.notes.append("fc.bias is in the file and is used, although config.json says bias: false")
            specific: dict[str, Any] = {"target_hidden_size": hidden}
        else:
            specific, unused = self._third(hidden, fc_in, convention, override)
        config = EagleConfig(**shared, **specific, windows=self._windows(shared["num_layers"]))
        self._note_borrowing(config)
        return DraftFile(
            self.folder, config, self.store, self.raw, ids, self._layout(version), unused, tuple(self.notes)
        )

    def _heads(self, q_out: int) -> dict[str, int]:
        k_out, _ = self._matrix("layers.0.self_attn.k_proj.weight")
        norm = "layers.0.self_attn.q_norm.weight"
        count, stated = self._whole("num_attention_heads"), self._whole("head_dim")
        if self._has(norm):
            head_dim = self.store.shape(norm)[0]
        elif count is not None:
            head_dim = q_out // count
        elif stated is not None:
            head_dim = stated
        else:
            self._fail(
                "config.json has neither num_attention_heads nor head_dim; the heads cannot be told apart"
            )
        if q_out % head_dim or k_out % head_dim or count not in (None, q_out // head_dim):
            self._fail(
                f"{count} heads and head_dim {head_dim} do not fit projections of {q_out} (q) and {k_out} "
                f"(k) values"
            )
        if stated not in (None, head_dim):
            self._fail(
                f"config.json says {count} heads of {stated}, but q_proj makes {q_out} values, which is "
                f"{head_dim} each"
            )
        kv_heads = k_out // head_dim
        if self._whole("num_key_value_heads") not in (None, kv_heads):
            self._fail(
                f"config.json says {self._whole('num_key_value_heads')} key/value heads, the tensors have "
                f"{kv_heads}"
            )
        return {"num_heads": q_out // head_dim, "num_kv_heads": kv_heads, "head_dim": head_dim}

    def _mlp(self) -> dict[str, int]:
        """Width of the dense MLP, or the experts, whose number a token is the one thing no shape tells."""
        pattern = r"layers\.\d+\.mlp\.experts\.(\d+)\."
        found = [int(m[1]) for n in self.store.names() if (m := re.match(pattern, n))]
        chosen = self.settings.get("experts_per_token")
        if not found:
            if chosen is not None:
                self._fail(f"config.json says {KEY}.experts_per_token, but the file holds no experts")
            return {"intermediate_size": self._matrix("layers.0.mlp.gate_proj.weight")[0]}
        if chosen is None:
            self._fail(
                "its MLP is a mixture of experts, and config.json does not say how many a token passes "
                f'("{KEY}": {{"experts_per_token": ...}})'
            )
        width = self._matrix("layers.0.mlp.experts.0.gate_proj.weight")[0]
        return {
            "num_experts": max(found) + 1,
            "experts_per_token": chosen,
            "moe_intermediate_size": width,
            "intermediate_size": chosen * width,
        }

    def _layers(self) -> int:
        found = sorted({int(m[1]) for n in self.store.names() if (m := re.match(r"layers\.(\d+)\.", n))})
        if found != list(range(len(found))):
            self._fail(f"its layers are numbered {found}; they must count up from 0")
        stated = self._whole("num_hidden_layers")
        if stated not in (None, len(found)):
            self.notes.append(
                f"config.json says {stated} layers; the file holds {len(found)}, which is what counts"
            )
        return len(found)

    def _rope(self) -> rope.RopeConfig:
        settings = rope.from_hf(self.layer)
        places = [self.layer.get(k) for k in ("rope_parameters", "rope_scaling")]
        if self.layer.get("rope_theta") is None and not any(
            isinstance(p, Mapping) and p.get("rope_theta") is not None for p in places
        ):
            self.notes.append(
                "config.json has no rope_theta; 10000 is used, as the trainers of such drafts did"
            )
        return settings

    def _activation(self) -> str:
        name = self.layer.get("hidden_act") or "silu"
        if name not in _ACTIVATIONS:
            self._fail(f"activation {name!r} is not supported; use one of {sorted(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        if "windows" in self.settings:
            return tuple(self.settings["windows"])
        kinds = self.layer.get("layer_types")
        if not kinds or "sliding_attention" not in kinds[:layers]:
            return ()
        if len(kinds) < layers:
            self._fail(f"layer_types has {len(kinds)} entries for {layers} layers")
        window = self._whole("sliding_window")
        if window is None:
            self._fail("layer_types names sliding_attention but config.json has no sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])

    def _vocabulary(self, hidden: int) -> tuple[int, int, np.ndarray | None]:
        """(V, Vd, target ids or None) from the map, the embedding, the head and, last, the config."""
        sizes: dict[str, int] = {}
        for name in ("t2d", "d2t"):
            if self._has(name):
                if len(self.store.shape(name)) != 1:
                    self._fail(f"{name} has shape {self.store.shape(name)}; it must be a vector")
                sizes[name] = self.store.shape(name)[0]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if self._has(name):
                rows, width = self._matrix(name)
                if width != hidden:
                    self._fail(f"{name} is {width} wide, the draft {hidden}")
                sizes[name] = rows
        vocab = sizes.get("t2d") or sizes.get("embed_tokens.weight") or self._whole("vocab_size")
        if vocab is None:
            self._fail("neither its tensors nor config.json say how large the target's vocabulary is")
        if sizes.get("embed_tokens.weight", vocab) != vocab:
            self._fail(f"t2d covers {vocab} tokens but embed_tokens.weight {sizes['embed_tokens.weight']}")
        if self._whole("vocab_size") not in (None, vocab):
            self.notes.append(
                f"config.json says vocab_size {self._whole('vocab_size')}; the tensors say {vocab}"
            )
        stated = self.raw.get("draft_vocab_size")
        draft = sizes.get("lm_head.weight") or sizes.get("d2t") or stated or vocab
        if isinstance(draft, bool) or not isinstance(draft, int) or not 0 < draft <= vocab:
            self._fail(f"the draft's vocabulary is {draft!r}; it must lie in 1..{vocab}")
        if sizes.get("d2t", draft) != draft:
            self._fail(f"d2t has {sizes['d2t']} entries for a head of {draft} tokens")
        if stated not in (None, draft):
            self.notes.append(f"config.json says draft_vocab_size {stated}; the tensors say {draft}")
        self._check_head(draft < vocab)
        ids, note = target_ids(self.store, vocab, draft, str(self.folder))
        if note:
            self.notes.append(note)
        return vocab, draft, ids

    def _check_head(self, reduced: bool) -> None:
        """Without a word from the file, a reduced draft without a head is a broken one."""
        said, found = self.settings.get("head"), self._has("lm_head.weight")
        if said is not None and (said == "own") != found:
            self._fail(
                f"config.json says {KEY}.head: {said!r}, but the file {'holds' if found else 'lacks'} "
                "lm_head.weight"
            )
        if said == "target_rows" and not reduced:
            self._fail(f"config.json says {KEY}.head: 'target_rows', but the draft has the whole vocabulary")
        if reduced and not found and said != "target_rows":
            self._fail(
                "lacks lm_head.weight; a draft of a part of the vocabulary cannot borrow the target's head "
                f'unless its config.json says so ("{KEY}": {{"head": "target_rows"}})'
            )

    def _third(
        self, hidden: int, fc_in: int, convention: AuxConvention, override: tuple[int, ...] | None
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Settings that EAGLE-3 alone has, and tensors that they switch off."""
        if self._flag("use_aux_hidden_state", True) is False:
            self._fail(
                "use_aux_hidden_state is false: an EAGLE-3 layer on the final feature alone is not supported"
            )
        each = sum(bool(re.fullmatch(r"fc_norm\.\d+\.weight", n)) for n in self.store.names())
        joined = self._has("input_norm.weight")
        for flag, present, tensor in (
            ("norm_before_fc", joined, "input_norm.weight"),
            ("fc_norm", bool(each), "fc_norm.0.weight"),
        ):
            stated = self._flag(flag)
            if stated and not present:
                self._fail(f"config.json sets {flag}, but there is no {tensor}")
            if stated is False and present:
                self._fail(
                    f"config.json says {flag}: false, but the file holds {tensor}; one of them is wrong"
                )
        if joined and each:
            self._fail("it holds both input_norm and fc_norm; a draft normalises its features one way")
        aux_norm: AuxNorm = "each" if each else "joined" if joined else "none"
        aux = override if override is not None else self._boundaries(convention)
        num_aux, target_hidden = self._widths(hidden, fc_in, len(aux), each)
        head_norm, feed_normed, unused = self._norm_output()
        return {
            "target_hidden_size": target_hidden,
            "num_aux": num_aux,
            "aux": aux,
            "aux_norm": aux_norm,
            "norm_before_residual": bool(self._flag("norm_before_residual", False)),
            "head_norm": head_norm,
            "feed_normed": feed_normed,
        }, unused

    def _boundaries(self, convention: AuxConvention) -> tuple[int, ...]:
        """Boundaries named by the config, () when it names none."""
        inner = self.raw.get("eagle_config")
        places = [self.raw, inner] if isinstance(inner, Mapping) else [self.raw]
        lists = [p[_AUX_KEY] for p in places if p.get(_AUX_KEY)]
        if "boundaries" in self.settings:
            if lists:
                self._fail(f"config.json names feature layers as {_AUX_KEY} and as {KEY}.boundaries")
            convention, lists = "boundary", [self.settings["boundaries"]]
        if not lists:
            self.notes.append(
                "config.json names no feature layers; the usual boundaries 2, n/2, n-3 are used"
            )
            return ()
        if any(x != lists[0] for x in lists):
            self._fail(f"config.json gives {_AUX_KEY} twice and differently: {lists}")
        ids = lists[0]
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self._fail(f"{_AUX_KEY} is {ids!r}; it must be a list of integers")
        if not rising(np.asarray(ids)):
            self._fail(f"{_AUX_KEY} {ids} must be increasing: features are joined in the order of the layers")
        why = "as asked for"
        if "boundaries" in self.settings:
            why = "eaglejax names boundaries"
        elif convention == "auto":
            if self.speculators:
                convention, why = "boundary", "speculators counts hidden-state boundaries"
            elif ids[0] == 1:
                convention, why = (
                    "block",
                    "a list that starts at 1 counts blocks (the usual default is 1, n/2-1, n-4)",
                )
            else:
                convention, why = "boundary", "it does not start at 1, the usual mark of block numbers"
        aux = tuple(i + 1 if convention == "block" else i for i in ids)
        self.notes.append(
            f"layer ids {ids} are read by the {convention} convention ({why}): boundaries {list(aux)}"
        )
        return aux

    def _widths(self, hidden: int, fc_in: int, named: int, normed: int) -> tuple[int, int]:
        """(features fused, width of each)."""
        stated = self.raw.get("target_hidden_size")
        if named or normed:
            count = named or normed
        elif stated:
            count = fc_in // stated
        else:
            count = fc_in // hidden if fc_in % hidden == 0 else 3
        if normed and normed != count:
            self._fail(f"{normed} fc_norm weights for {count} features")
        if count < 1 or fc_in % count or (stated and fc_in != count * stated):
            self._fail(
                f"fc.weight reads {fc_in} values, which is not {count} features of "
                f"{stated or 'one'} width; are the layer ids right?"
            )
        return count, fc_in // count

    def _norm_output(self) -> tuple[bool, bool, tuple[str, ...]]:
        """(norm before the head, state fed back after it, tensors unused): one flag, a meaning a producer."""
        flag = self._flag("norm_output")
        if "head_norm" in self.settings:
            if flag is not None:
                self._fail(f"config.json has norm_output and {KEY}.head_norm; one of them is to go")
            head_norm = self.settings["head_norm"]
            return head_norm, bool(self._flag("feed_normed")), () if head_norm else ("norm.weight",)
        if self.speculators:
            return True, bool(flag), ()
        if flag is None:
            return True, False, ()
        if flag:
            self.notes.append(
                "norm_output: true in a flat config means a norm before the head (SpecForge), as usual"
            )
            return True, False, ()
        self.notes.append("norm_output: false in a flat config means no norm before the head (SpecForge)")
        return False, False, ("norm.weight",)

    def _note_borrowing(self, config: EagleConfig) -> None:
        parts = (("embedding", config.own_embedding), ("head", config.own_head))
        borrowed = [name for name, own in parts if not own]
        if borrowed:
            self.notes.append(f"the target's {' and '.join(borrowed)} will be used; the file has none")
        if config.target_rows:
            self.notes.append(
                f"of the target's head the {config.draft_vocab_size} rows of the draft's tokens are taken"
            )

    def _layout(self, version: int) -> str:
        stored = list(self.store.stored.values())
        wrapped = any(n.startswith(("model.", "draft_model.", "eagle_module.", "module.")) for n in stored)
        if "head" in self.settings:
            return "eaglejax"
        if self.speculators:
            return "speculators"
        if version == 1:
            return "vllm-eagle1" if wrapped and self._has("lm_head.weight") else "safeailab-eagle1"
        if any("midlayer." in n for n in stored):
            return "midlayer (SafeAILab, SGLang, SpecForge, AngelSlim)"
        if wrapped:
            return "nemo"
        return "modelopt" if not self._has("t2d") else "layers.0"


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
