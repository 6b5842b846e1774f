"""What a figure was measured on: the machine, the versions and the settings in force."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

from eaglejax.devices.startup import prepare

GIB = 1 << 30
VERSIONS = ("eaglejax", "jax", "jaxlib", "numpy", "transformers", "tokenizers", "safetensors", "gguf")


def describe() -> dict[str, Any]:
    """The ``machine`` object of every report. Starts jax."""
    import jax

    startup = prepare()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / GIB, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu_flags": list(startup.cpu_flags.in_force),
    }


def processor() -> str:
    """The processor's model name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes() -> int:
    """Bytes that can still be allocated where jax's default device keeps its arrays."""
    import jax

    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return host_free_bytes()


def host_free_bytes() -> int:
    """Bytes of main memory that a process can still take: what the system calls available, within the limit
    of the process's control group; all of it where the system does not say."""
    known = [memory_bytes()]
    info = Path("/proc/meminfo")
    if info.is_file() and (found := re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())):
        known.append(int(found[1]) << 10)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, held = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Pages of files that nobody uses are given back before anything is refused.
        idle = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        known.append(limit - held + (int(idle[1]) if idle else 0))
    return max(0, min(known))


def peak_memory_bytes() -> int:
    """Most memory that this process has held, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
