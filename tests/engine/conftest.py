"""Engines are tested with the tiny targets and drafts of the conformance suite."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
