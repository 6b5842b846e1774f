"""The suite's oracle of verification stands with the tests of the rules."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("conformance", "laws", "drafts")]

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    """Programs here are compiled once and run for moments: half of the time would go into optimising them.
    Those that draw 100 thousand texts are worth it."""
    if request.module.__name__ == "test_law":
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
