"""C++ sources compiled on first use: a library is made once for a machine and kept in the cache folder.

The only tool asked of a machine is a C++ compiler, ``g++`` or the one that ``$CXX`` names. Nothing here
imports jax at module level.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kernels_pallas.errors import KernelError

HOME_VARIABLE = "EAGLEJAX_CACHE"
OFF_VARIABLE = "EAGLEJAX_NO_NATIVE"
LEVEL_VARIABLE = "EAGLEJAX_NATIVE_LEVEL"

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
# Best first: (level, what the processor must have for it, as /proc/cpuinfo names it).
_LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("avx512-bf16", (*_AVX2, *_AVX512, "avx512_vnni", "avx512_bf16")),
    ("avx512-vnni", (*_AVX2, *_AVX512, "avx512_vnni")),
    ("avx512", (*_AVX2, *_AVX512)),
    ("avx-vnni", (*_AVX2, "avx_vnni")),
    ("avx2", _AVX2),
    ("dotprod", ("asimd", "asimddp")),
    ("neon", ("asimd",)),
    ("portable", ()),
)
LEVELS = tuple(name for name, _ in _LEVELS)
VECTOR_LEVELS = LEVELS[:-1]
"""Levels with instructions of their own for vectors."""

# What the compiler is told for an Arm level: of its features' names only some are flags.
_ARM_FLAGS = {"dotprod": ["-march=armv8.2-a+dotprod"], "neon": []}
_COMPILE_FLAGS = (
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-ffp-contract=off",
    "-pthread",
)
_COMPILE_SECONDS = 900
INCLUDE = Path(__file__).parent / "include"
"""Headers that the sources share."""


def home(environ: Mapping[str, str]) -> Path:
    """Folder of what can be made again: ``$EAGLEJAX_CACHE``, else ``~/.cache/eaglejax``."""
    return Path(environ.get(HOME_VARIABLE) or "~/.cache/eaglejax").expanduser()


def processor_features() -> frozenset[str]:
    """What the processor says that it can do; empty where the system does not tell (only Linux does)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").split())


def levels_here() -> tuple[str, ...]:
    """Levels that this processor runs, best first; "portable" is always the last."""
    features = processor_features()
    return tuple(name for name, needed in _LEVELS if features.issuperset(needed))


def level_here(environ: Mapping[str, str] = os.environ) -> str:
    """The level in force: the best, or the one that ``$EAGLEJAX_NATIVE_LEVEL`` names.

    Raises:
      KernelError: turned off by ``$EAGLEJAX_NO_NATIVE``, or that level is unknown or more than this processor
        has.
    """
    if environ.get(OFF_VARIABLE, "") not in ("", "0"):
        raise KernelError(f"turned off by {OFF_VARIABLE}")
    here = levels_here()
    asked = environ.get(LEVEL_VARIABLE)
    if asked and asked not in here:
        raise KernelError(f"{LEVEL_VARIABLE} is {asked!r}; this processor runs {', '.join(here)}")
    return asked or here[0]


COMPILE_SECONDS: list[float] = []
"""How long each compilation of this process took."""


@dataclasses.dataclass(frozen=True)
class Library:
    """A compiled source: ``handle`` to its symbols, the ``level`` it was compiled for, and its ``key``.

    The key changes with everything that went into the library, so a name made of it never means two things.
    """

    handle: ctypes.CDLL
    path: Path
    level: str
    key: str


def load(source: Path, level: str, environ: Mapping[str, str] = os.environ) -> Library:
    """Compile ``source`` for ``level``, or find it compiled, and load it.

    Raises:
      KernelError: no compiler, or it failed (the message holds its first lines), or the folder cannot be
        written.
    """
    name = environ.get("CXX") or "g++"
    compiler = shutil.which(name, path=environ.get("PATH"))
    if compiler is None:
        raise KernelError(f"there is no C++ compiler: {name} is not on the path (install g++, or set CXX)")
    flags = compile_flags(level)
    key = _key(source, level, flags, compiler)
    path = home(environ) / "native" / f"{source.stem}-{level}-{key}.so"
    if not path.exists():
        _compile(compiler, flags, source, path)
    try:
        return Library(ctypes.CDLL(str(path)), path, level, key)
    except OSError as error:
        raise KernelError(
            f"{path} cannot be loaded ({error}); delete it to have it compiled again"
        ) from error


def compile_flags(level: str) -> list[str]:
    """What a compiler is told for ``level``: that it makes a library, and which instructions it may use."""
    features = [f"-m{feature.replace('_', '')}" for feature in dict(_LEVELS)[level]]
    return [*_COMPILE_FLAGS, *_ARM_FLAGS.get(level, features)]


def _key(source: Path, level: str, flags: list[str], compiler: str) -> str:
    parts = [
        source.read_text(encoding="utf-8"),
        *(header.read_text(encoding="utf-8") for header in sorted(INCLUDE.glob("*.h"))),
        level,
        *flags,
        compiler,
        _version(compiler, os.stat(compiler).st_mtime_ns),
        importlib.metadata.version("jaxlib"),
        platform.machine(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _version(compiler: str, changed: int) -> str:
    """What the compiler says it is; ``changed``, its file's time, tells a replaced one from it."""
    del changed
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"the C++ compiler {compiler} does not run: {error}") from error
    return answer.stdout


def _compile(compiler: str, flags: list[str], source: Path, path: Path) -> None:
    import jax

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError as error:
        raise KernelError(f"{path.parent} cannot be written: {error.strerror}") from error
    os.close(handle)
    include = ["-I", str(INCLUDE), "-isystem", jax.ffi.include_dir()]
    command = [compiler, *flags, *include, str(source), "-o", temporary]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS, check=False
        )
        if done.returncode:
            first = "\n".join(done.stderr.splitlines()[:8])
            raise KernelError(
                f"{compiler} could not compile {source.name} for {platform.machine()}:\n{first}"
            )
        # Whoever compiled at the same time made the same file; the last one to rename it stays.
        os.replace(temporary, path)
        COMPILE_SECONDS.append(time.perf_counter() - start)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{compiler} could not compile {source.name}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
