"""What eaglejax itself says of a draft in config.json, under the key ``eaglejax``.

Other producers' forms leave settings to conventions or have no place for them. This block names them, so that
every draft can be written and read back as it is. All entries are optional; a file of another form may carry
some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from eaglejax.drafts.eagle.config import AuxNorm, EagleConfig
from eaglejax.errors import ConfigError

KEY = "eaglejax"
ARCHITECTURE = "EaglejaxDraft"
"""What config.json calls a draft in eaglejax's own form."""
HEADS = ("own", "target", "target_rows")
"""Where the head is: in the file, the target's, or the target's at the draft's tokens."""

Settings = Mapping[str, Any]


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "head": (lambda v: v in HEADS, f"one of {', '.join(HEADS)}"),
    "boundaries": (
        lambda v: isinstance(v, list) and all(_whole(i, 0) for i in v),
        "a list of hidden-state boundaries (0 = embedding)",
    ),
    "norm_before_residual": (_boolean, "true or false"),
    "head_norm": (_boolean, "true or false"),
    "feed_normed": (_boolean, "true or false"),
    "use_aux_hidden_state": (_boolean, "true or false"),
    "embed_scale": (_positive, "a positive number"),
    "softcap": (_positive, "a positive number"),
    "experts_per_token": (lambda v: _whole(v, 1), "a positive integer"),
    "mask_id": (lambda v: _whole(v, 0), "the id of a token"),
    "basis": (lambda v: isinstance(v, str) and bool(v), "the id of a basis"),
    "own_embedding": (_boolean, "true or false"),
    "feature_map": (_boolean, "true or false"),
    "fc_bias": (_boolean, "true or false"),
    "qkv_bias": (_boolean, "true or false"),
    "o_bias": (_boolean, "true or false"),
    "qk_norm": (_boolean, "true or false"),
    "aux_norm": (lambda v: v in get_args(AuxNorm), f"one of {', '.join(get_args(AuxNorm))}"),
    "map": (
        lambda v: isinstance(v, list) and all(i in ("d2t", "t2d") for i in v),
        "a list of the tensors that hold the vocabulary map, d2t and t2d",
    ),
    "windows": (
        lambda v: isinstance(v, list) and all(i is None or _whole(i, 1) for i in v),
        "a list of positive integers and nulls",
    ),
}


_PARTS = ("own_embedding", "feature_map", "fc_bias", "qkv_bias", "o_bias", "qk_norm", "aux_norm")
"""Settings that a tensor's presence would mean to a reader: all of them are recorded, on or off, so that a
lost tensor is missed."""


def write_settings(config: EagleConfig) -> dict[str, Any]:
    """The block for ``config``: optional parts on or off, other settings where they are in use."""
    head = "own" if config.own_head else "target_rows" if config.target_rows else "target"
    flags = ("norm_before_residual", "head_norm", "feed_normed") if config.version == 3 else ()
    values: dict[str, Any] = {
        "boundaries": list(config.aux) or None,
        **{name: getattr(config, name) for name in (*flags, *_PARTS)},
        "map": ["d2t", "t2d"] if config.reduced else [],
        "use_aux_hidden_state": False if config.version == 3 and config.reads_final else None,
        "embed_scale": config.embed_scale,
        "softcap": config.softcap,
        "basis": config.basis,
        "experts_per_token": config.experts_per_token or None,
        "mask_id": config.mask_id,
        "windows": list(config.windows) if any(config.windows) else None,
    }
    return {"head": head} | {name: value for name, value in values.items() if value is not None}


def read_settings(raw: Mapping[str, Any]) -> Settings:
    """The block of a config.json, {} where there is none. Raises ConfigError that names a wrong entry."""
    block = raw.get(KEY)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"config.json: {KEY} is {block!r}; it must be an object")
    for name, value in block.items():
        if name not in _ENTRIES:
            raise ConfigError(f"config.json: {KEY}.{name} is not known; known are {', '.join(_ENTRIES)}")
        good, wanted = _ENTRIES[name]
        if not good(value):
            raise ConfigError(f"config.json: {KEY}.{name} is {value!r}; it must be {wanted}")
    return block
