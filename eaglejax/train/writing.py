"""Logs that survive a kill in the middle of a line."""

from __future__ import annotations

import os
from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that is appended to, [] where there is none. A last line that a kill cut off is removed
    from the file, so that what is appended next starts a line of its own."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole.decode("utf-8").split("\n")[:-1]
