"""One of several programs, chosen on the device, without a copy of the state that each of them rewrites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.speculate.state import DecodeState

Branch = Callable[[DecodeState], tuple[DecodeState, Any]]


def run_one(index: jax.Array, branches: Sequence[Branch], state: DecodeState) -> tuple[DecodeState, Any]:
    """``branches[index]``, [] int32, of ``state``: a ``lax.switch`` that moves nothing.

    XLA copies what a conditional rewrites, here every cache, but not what a loop does; so each branch is a
    loop that runs once or not at all.
    """
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(branches[0], state)[1])
    carry = (index, state, blank)
    for number, branch in enumerate(branches):

        def body(carry: tuple[jax.Array, DecodeState, Any], branch: Branch = branch) -> Any:
            return jnp.int32(-1), *branch(carry[1])

        def chosen(carry: tuple[jax.Array, DecodeState, Any], number: int = number) -> jax.Array:
            return carry[0] == number

        carry = jax.lax.while_loop(chosen, body, carry)
    return carry[1:]


def run_if(
    condition: jax.Array, branch: Callable[[DecodeState], DecodeState], state: DecodeState
) -> DecodeState:
    """``branch(state)`` where ``condition`` [] bool, else ``state``; see :func:`run_one`."""
    return run_one(condition.astype(jnp.int32) - 1, [lambda state: (branch(state), ())], state)[0]
