"""The adapter of a device, and what a user puts in the place of its choices."""

from __future__ import annotations

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.devices import cpu, gpu, tpu
from eaglejax.devices.adapter import KERNELS, OPERATIONS, Adapter, Attention, check_runs
from eaglejax.devices.chips import GIB
from eaglejax.devices.dtypes import dtype_bytes
from eaglejax.errors import ConfigError
from eaglejax.kv_format import kv_format

VARIABLE = "EAGLEJAX_ADAPTER"
"""Environment variable that names a TOML file of overrides."""


def choose(device: Any = None, overrides: Mapping[str, Any] | str | Path | None = None) -> Adapter:
    """The adapter of ``device`` (None: jax's default device).

    ``overrides``: a mapping, or a TOML file of the same keys (see ``docs/devices.md``). Raises ConfigError
    for a platform without an adapter, an unknown key, a value that cannot be, and a kernel that cannot run on
    this device.
    """
    if device is None:
        import jax

        device = jax.devices()[0]
    makers = {"cpu": cpu.adapter, "tpu": tpu.adapter, "gpu": gpu.adapter}
    if device.platform not in makers:
        raise ConfigError(
            f"there is no adapter for platform {device.platform!r}; there are {', '.join(makers)}"
        )
    adapter = makers[device.platform](device)
    if overrides is None:
        return adapter
    values = overrides if isinstance(overrides, Mapping) else read_overrides(Path(overrides))
    return _override(adapter, values)


@functools.cache
def current() -> Adapter:
    """The adapter of the default device with the overrides of the file that ``$EAGLEJAX_ADAPTER`` names.

    Made once a process: programs are compiled for it.
    """
    return choose(overrides=os.environ.get(VARIABLE) or None)


def read_overrides(path: Path) -> dict[str, Any]:
    """The overrides in a TOML file. Raises ConfigError for one that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"adapter file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"adapter file {path} is not TOML: {error}") from error


ATTENTION_KEYS: dict[str, tuple[type, ...]] = {
    "attention": (str,),
    "interpret": (bool,),
    "block_kv": (int,),
}
PLAIN_KEYS: dict[str, tuple[type, ...]] = {
    "weight_dtype": (str,),
    "cache_dtype": (str,),
    "matmul_precision": (str,),
    "memory_gib": (int, float),
    "operations": (dict,),
}
PRECISIONS = ("default", "high", "highest")


def _override(adapter: Adapter, values: Mapping[str, Any]) -> Adapter:
    known = ATTENTION_KEYS | PLAIN_KEYS
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"adapter override {key!r} is not known; known are {', '.join(known)}")
        kinds = known[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"adapter override {key} is {value!r}; it must be of type {kinds[-1].__name__}")
    if "weight_dtype" in values:
        dtype_bytes(values["weight_dtype"])
    if "cache_dtype" in values:
        kv_format(values["cache_dtype"])
    if values.get("matmul_precision", "default") not in PRECISIONS:
        raise ConfigError(
            f"matmul_precision is {values['matmul_precision']!r}; use one of {', '.join(PRECISIONS)}"
        )
    if values.get("memory_gib", 1) <= 0:
        raise ConfigError(f"memory_gib is {values['memory_gib']}; it must be positive")
    changes: dict[str, Any] = {k: v for k, v in values.items() if k in PLAIN_KEYS and k != "memory_gib"}
    if "operations" in values:
        changes["operations"] = _operations(adapter, values["operations"])
    if "memory_gib" in values:
        changes["memory_bytes"] = int(values["memory_gib"] * GIB)
    if any(key in values for key in ATTENTION_KEYS):
        changes |= {"attention": _attention(adapter, values), "forced": True}
    chosen = {"memory_bytes" if k == "memory_gib" else k for k in values}
    if not chosen.isdisjoint(ATTENTION_KEYS):
        chosen = chosen - set(ATTENTION_KEYS) | {"attention"}
    reasons = {**dict(adapter.reasons), **dict.fromkeys(sorted(chosen), "chosen by the user")}
    return dataclasses.replace(adapter, **changes, reasons=tuple(reasons.items()))


def _attention(adapter: Adapter, values: Mapping[str, Any]) -> Attention:
    implementation = values.get("attention", adapter.attention.implementation)
    attention = Attention(
        implementation,
        **{key: values[key] for key in ("interpret", "block_kv") if key in values},
    )
    check_runs(adapter, attention)
    return attention


def _operations(adapter: Adapter, chosen: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    for name, implementation in chosen.items():
        if name not in OPERATIONS:
            raise ConfigError(f"operation {name!r} is not known; known are {', '.join(OPERATIONS)}")
        if implementation not in OPERATIONS[name]:
            raise ConfigError(
                f"operation {name} is to run on {implementation!r}; it runs on one of "
                f"{', '.join(OPERATIONS[name])}"
            )
        if implementation == adapter.platform and implementation in KERNELS and not adapter.kernels:
            raise ConfigError(
                f"the {implementation!r} kernel of {name} cannot be compiled for {adapter.name}; use 'xla'"
            )
    return tuple(chosen.items())
