"""The helpers of tests/drafts/eagle and tests/models."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "drafts" / "eagle"), str(TESTS / "models")]
