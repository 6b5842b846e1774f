"""What a device's host needs to replay a recording: the modules that import neither jax nor the rest of
eaglejax.

They import each other by their full names, so a copy has the package's own layout: a folder with
``eaglejax/__init__.py`` (empty), ``eaglejax/errors.py`` and ``eaglejax/interop/``. Put that folder first on
``sys.path`` and ``import eaglejax.interop.runner`` works with torch alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MODULES = (
    "__init__",
    "adapter",
    "arrays",
    "ascend",
    "decoder",
    "eagle",
    "growth",
    "layers",
    "limits",
    "musa",
    "names",
    "portable",
    "runner",
    "selfcheck",
    "specs",
    "torch_cpu",
    "torch_cuda",
    "torch_import",
)
"""Modules of ``eaglejax.interop`` that run without jax."""


def write_sources(folder: Path, extra: tuple[str, ...] = ()) -> list[Path]:
    """Copy the portable modules, and ``extra`` ones of ``eaglejax.interop``, below ``folder``.

    Returns the files written. ``folder`` may exist; files of the same name are replaced.
    """
    here = Path(__file__).parent
    package = folder / "eaglejax"
    (package / "interop").mkdir(parents=True, exist_ok=True)
    written = [package / "__init__.py"]
    written[0].write_text('"""The part of eaglejax that replays a recording with torch alone."""\n')
    sources = [here.parent / "errors.py", *(here / f"{name}.py" for name in (*MODULES, *extra))]
    for source in sources:
        written.append(package / source.relative_to(here.parent))
        shutil.copyfile(source, written[-1])
    return written
