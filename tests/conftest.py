"""Settings of every test process; they stand before the first import of jax."""

import os
from pathlib import Path

# The tests state what holds on a CPU; a GPU's default matmul precision would need other tolerances.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Beside the code, so that a user's cache neither helps nor harms.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
