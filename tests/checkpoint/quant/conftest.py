"""The command's tests use the tiny model of the command line's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
