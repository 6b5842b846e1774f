"""The server is tested over the tiny model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
