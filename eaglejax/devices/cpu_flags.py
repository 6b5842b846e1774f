"""XLA flags of a CPU, which must be set before jax starts.

XLA:CPU hands matrix products to XNNPACK only when told to. XLA aborts the process on a flag it does not know,
so flags are set only for jaxlib releases that are known, or that a child process has tried.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path

from eaglejax.devices import compile_cache

log = logging.getLogger(__name__)

FLAGS = {
    "--xla_cpu_experimental_xnn_fusion_type": "dot",
    "--xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_BYPASS_COST_MODEL",
}
KNOWN_JAXLIB = ("0.10.2", "0.12.0.1")
OFF_VARIABLE = "EAGLEJAX_NO_XLA_FLAGS"


@dataclasses.dataclass(frozen=True)
class FlagReport:
    """``in_force``: those of FLAGS that this process runs with, as XLA_FLAGS spells them. ``reason``: why."""

    in_force: tuple[str, ...]
    reason: str


def set_flags(environ: MutableMapping[str, str], *, started: bool) -> FlagReport:
    """Add FLAGS to ``XLA_FLAGS`` where they can help and are understood; a flag the user set keeps its value.

    ``started``: jax already made its backends, so that nothing set now is read.
    """
    given = {word.split("=")[0]: word for word in environ.get("XLA_FLAGS", "").split()}
    users = tuple(given[name] for name in FLAGS if name in given)
    missing = [f"{name}={value}" for name, value in FLAGS.items() if name not in given]
    refusal = _why_not(environ, missing, started)
    if refusal:
        return FlagReport(users, refusal)
    environ["XLA_FLAGS"] = " ".join([*given.values(), *missing])
    return FlagReport((*users, *missing), "set before jax started")


def _why_not(environ: MutableMapping[str, str], missing: list[str], started: bool) -> str | None:
    """Why ``missing`` flags are not to be set, or None."""
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if not missing:
        return "chosen by the user"
    if environ.get(OFF_VARIABLE, "") not in ("", "0"):
        return f"turned off by {OFF_VARIABLE}"
    if platforms != [""] and platforms[0] != "cpu":
        return f"not for platform {platforms[0]} (JAX_PLATFORMS)"
    if platforms == [""] and accelerator_present():
        return "not set: this machine has an accelerator (JAX_PLATFORMS=cpu computes on the CPU instead)"
    if started:
        log.warning(
            "jax had started before eaglejax was imported, so its CPU flags could not be set; "
            "import eaglejax before the first use of jax"
        )
        return "could not be set: jax had already started when eaglejax was imported"
    version = importlib.metadata.version("jaxlib")
    if version not in KNOWN_JAXLIB and not understands(version, missing, environ):
        return f"not set: jaxlib {version} does not understand them"
    return None


def accelerator_present() -> bool:
    """Whether the machine has a TPU or GPU that jax could prefer to the CPU, going by device files."""
    patterns = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    return any(next(Path("/dev").glob(pattern), None) for pattern in patterns)


def understands(
    version: str,
    flags: list[str],
    environ: MutableMapping[str, str],
    probe: Callable[[list[str]], bool] | None = None,
) -> bool:
    """Whether this jaxlib starts with ``flags``.

    Tried once in a child process and remembered under the cache folder, for each release and list of flags.
    """
    memory = compile_cache.home(environ) / f"xla-flags-jaxlib-{version}.json"
    known = _read(memory)
    key = " ".join(flags)
    if key not in known:
        known[key] = (probe or _starts_with)(flags)
        _remember(memory, known)
    return known[key]


def _starts_with(flags: list[str]) -> bool:
    child = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices('cpu')"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return child.returncode == 0


def _read(memory: Path) -> dict[str, bool]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Missing or damaged: the probe runs again and writes a sound one.
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: dict[str, bool]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False, encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(file.name, memory)
    except OSError as error:
        log.info("the result of the flag probe could not be kept in %s: %s", memory, error)
