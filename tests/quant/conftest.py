"""Tests here share the families and the tiny drafts of their neighbours."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(TESTS / name) for name in ("models", "drafts/eagle", "conformance", "checkpoint", "cli", "train")
]
