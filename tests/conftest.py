"""Settings of every test process; they stand before the first import of jax."""

import gc
import os
from pathlib import Path

import pytest

# The tests state what holds on a CPU; a GPU's default matmul precision would need other tolerances.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where the TPU compilers are installed, every test process loads them; none of them opens a TPU.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Beside the code, so that a user's cache neither helps nor harms.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
# Programs are compiled once and run for moments: half of the time would go into optimising them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# What tests say of drafts must not follow how fast a busy machine is; those of adaptive widths ask for them.
os.environ.setdefault("EAGLEJAX_SPECULATION", "fixed")


MOST_MAPPINGS = 20_000
"""Linux gives a process 65,530 memory mappings. Every compiled program takes some and keeps them while jax
remembers it; at the limit the compiler dies."""


@pytest.fixture(autouse=True, scope="module")
def _forget_programs_in_time():
    """Let jax forget what it compiled, between modules, before a worker runs out of mappings."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _optimise_what_runs_for_long(request):
    """Modules that draw 100 thousand texts, or read what the compiler made, say ``OPTIMISED = True``."""
    if not getattr(request.module, "OPTIMISED", False):
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def run(capfd):
    """Run the console command in this process: (exit status, stdout, stderr)."""
    from eaglejax.cli.main import main

    def call(*argv):
        capfd.readouterr()
        status = main([str(a) for a in argv])
        return status, *capfd.readouterr()

    return call
