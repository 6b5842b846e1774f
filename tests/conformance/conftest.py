"""The suite's oracle of verification stands with the tests of the rules."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("conformance", "laws", "drafts")]
