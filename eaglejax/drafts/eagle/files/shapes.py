"""What an EAGLE checkpoint's tensors and layer settings say about a draft's shape, and where they
contradict each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from eaglejax.drafts.eagle.files.names import PlainStore
from eaglejax.drafts.eagle.files.settings import ARCHITECTURE, KEY, read_settings
from eaglejax.errors import CheckpointError
from eaglejax.nn import rope

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


class Shapes:
    """A checkpoint that is being read. ``layer``: the settings of its decoder layers, ``settings``: those
    that eaglejax wrote, ``notes``: choices made on the way."""

    def __init__(self, folder: Path, raw: Mapping[str, Any], store: PlainStore) -> None:
        self.folder, self.raw, self.store = folder, raw, store
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.settings = read_settings(raw)
        self.own_form = "head" in self.settings and raw.get("architectures") == [ARCHITECTURE]
        nested = raw.get("transformer_layer_config")
        self.speculators = any(
            k in raw for k in ("speculators_config", "speculators_model_type", "transformer_layer_config")
        )
        if self.speculators and not isinstance(nested, Mapping):
            self.fail("config.json is of the speculators form but has no transformer_layer_config")
        self.layer: Mapping[str, Any] = raw
        if isinstance(nested, Mapping):
            kind = nested.get("model_type", "qwen3")
            if not isinstance(kind, str) or kind not in _NESTED_DEFAULTS:
                self.fail(
                    f"transformer_layer_config.model_type {kind!r} is not supported; llama and qwen3 are"
                )
            self.layer = {**_NESTED_DEFAULTS[kind], **{k: v for k, v in nested.items() if v is not None}}

    def fail(self, text: str) -> NoReturn:
        """Raise CheckpointError about this draft."""
        raise CheckpointError(f"{self.folder}: {text}")

    def doubt(self, text: str) -> None:
        """A note that may mean another draft than the one that is read, so that callers are warned of it."""
        self.notes.append(text)
        self.doubts.append(text)

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.store.names()

    def matrix(self, name: str) -> tuple[int, int]:
        """A matrix's shape."""
        if not self.has(name):
            self.fail(
                f"lacks {name}, which every EAGLE draft has; it holds {_some(sorted(self.store.names()))}"
            )
        shape = self.store.shape(name)
        if len(shape) != 2:
            self.fail(f"{name} has shape {shape}; it must be a matrix")
        return shape[0], shape[1]

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """A boolean that stands at the top, in the nested layers' settings, in ``eagle_config`` or in
        eaglejax's own block."""
        inner = self.raw.get("eagle_config")
        places = [self.raw, self.layer, self.settings, *([inner] if isinstance(inner, Mapping) else [])]
        found = [p[name] for p in places if p.get(name) is not None]
        if any(value != found[0] for value in found):
            self.fail(f"config.json says {name} twice and differently")
        value = found.pop() if found else default
        if value is not None and not isinstance(value, bool):
            self.fail(f"{name} is {value!r}; it must be true or false")
        return value

    def whole(self, key: str, *, top: bool = False) -> int | None:
        """A positive integer of the layer's settings, or of those at the ``top``, or None."""
        value = (self.raw if top else self.layer).get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(f"{key} is {value!r}; it must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0 of the layer's settings."""
        value = self.layer.get(key)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            self.fail(f"{key} is {value!r}; it must be a number above 0")
        return float(value)

    def heads(self, q_out: int) -> dict[str, int]:
        """Counts and size of attention heads, as tensors and settings agree."""
        k_out, _ = self.matrix("layers.0.self_attn.k_proj.weight")
        norm = "layers.0.self_attn.q_norm.weight"
        count, stated = self.whole("num_attention_heads"), self.whole("head_dim")
        if self.has(norm):
            head_dim = self.store.shape(norm)[0]
        elif count is not None:
            head_dim = q_out // count
        elif stated is not None:
            head_dim = stated
        else:
            self.fail(
                "config.json has neither num_attention_heads nor head_dim; the heads cannot be told apart"
            )
        if not head_dim or q_out % head_dim or k_out % head_dim or count not in (None, q_out // head_dim):
            self.fail(
                f"{count} heads and head_dim {head_dim} do not fit projections of {q_out} (q) and {k_out} "
                f"(k) values"
            )
        if stated not in (None, head_dim):
            self.fail(
                f"config.json says {count} heads of {stated}, but q_proj makes {q_out} values, which is "
                f"{head_dim} each"
            )
        kv_heads = k_out // head_dim
        if self.whole("num_key_value_heads") not in (None, kv_heads):
            self.fail(
                f"config.json says {self.whole('num_key_value_heads')} key/value heads, the tensors have "
                f"{kv_heads}"
            )
        return {"num_heads": q_out // head_dim, "num_kv_heads": kv_heads, "head_dim": head_dim}

    def mlp(self) -> dict[str, int]:
        """Width of the dense MLP, or the experts, whose number a token is the one thing no shape tells."""
        pattern = r"layers\.\d+\.mlp\.experts\.(\d{1,9})\."
        found = {int(m[1]) for n in self.store.names() if (m := re.match(pattern, n))}
        chosen = self.settings.get("experts_per_token")
        if not found:
            if chosen is not None:
                self.fail(f"config.json says {KEY}.experts_per_token, but the file holds no experts")
            return {"intermediate_size": self.matrix("layers.0.mlp.gate_proj.weight")[0]}
        if max(found) >= len(found):
            self.fail(f"its experts are numbered up to {max(found)}, but there are {len(found)} of them")
        if chosen is None:
            self.fail(
                "its MLP is a mixture of experts, and config.json does not say how many a token passes "
                f'("{KEY}": {{"experts_per_token": ...}})'
            )
        width = self.matrix("layers.0.mlp.experts.0.gate_proj.weight")[0]
        return {
            "num_experts": max(found) + 1,
            "experts_per_token": chosen,
            "moe_intermediate_size": width,
            "intermediate_size": chosen * width,
        }

    def layers(self) -> int:
        """Number of layers."""
        found = sorted({int(m[1]) for n in self.store.names() if (m := re.match(r"layers\.(\d{1,9})\.", n))})
        if found != list(range(len(found))):
            self.fail(f"its layers are numbered {found}; they must count up from 0")
        stated = self.whole("num_hidden_layers")
        if stated not in (None, len(found)):
            if self.own_form:
                self.fail(f"config.json says {stated} layers; the file holds {len(found)}: some were lost")
            self.notes.append(
                f"config.json says {stated} layers; the file holds {len(found)}, which is what counts"
            )
        return len(found)

    def rope(self) -> rope.RopeConfig:
        """Rotary settings."""
        settings = rope.from_hf(self.layer)
        places = [self.layer.get(k) for k in ("rope_parameters", "rope_scaling")]
        if self.layer.get("rope_theta") is None and not any(
            isinstance(p, Mapping) and p.get("rope_theta") is not None for p in places
        ):
            self.notes.append(
                "config.json has no rope_theta; 10000 is used, as the trainers of such drafts did"
            )
        return settings

    def activation(self) -> str:
        """The MLP's activation, by its name here."""
        name = self.layer.get("hidden_act") or "silu"
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            self.fail(f"activation {name!r} is not supported; use one of {sorted(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Attention windows by layer; empty when all see everything."""
        if "windows" in self.settings:
            return tuple(self.settings["windows"])
        kinds = self.layer.get("layer_types")
        if kinds is not None and not (isinstance(kinds, list) and all(isinstance(k, str) for k in kinds)):
            self.fail(f"layer_types is {kinds!r}; it must be a list of names")
        if not kinds or "sliding_attention" not in kinds[:layers]:
            return ()
        if len(kinds) < layers:
            self.fail(f"layer_types has {len(kinds)} entries for {layers} layers")
        window = self.whole("sliding_window")
        if window is None:
            self.fail("layer_types names sliding_attention but config.json has no sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
