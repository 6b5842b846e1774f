"""Makes the kernel tests' helpers importable: devices that are not there, and compiling for them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
