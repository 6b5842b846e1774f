"""The tests of what is special drive the loop with the conformance suite's tools."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
