"""Which implementation of an operation runs, and whether a kernel is interpreted."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from kernels_pallas.errors import KernelError, require

Implementation = Literal["auto", "xla", "tpu", "gpu"]
# True is the generic Pallas interpreter; `pltpu.InterpretParams` and its GPU twin are the machine simulators.
Interpret = bool | Any | None


def choose(op: str, implementation: str, refusals: Mapping[str, str | None]) -> str:
    """Pick "xla", "tpu" or "gpu".

    Args:
      op: name of the operation, for messages.
      implementation: what the caller asked for. "auto" takes the TPU kernel on a TPU when it accepts the
        arguments and "xla" otherwise; any other name is taken or refused, never replaced.
      refusals: for each implementation the operation has, None or why it does not take these arguments.

    Raises:
      KernelError: unknown name, or the named implementation refuses; names those that accept.
    """
    if implementation == "auto":
        # The GPU kernels have run in simulation alone, so they are taken by name only.
        return "tpu" if jax.default_backend() == "tpu" and refusals.get("tpu", "") is None else "xla"
    accepted = [name for name, refusal in refusals.items() if refusal is None]
    if implementation not in refusals:
        raise KernelError(
            f"{op}: no implementation {implementation!r} for this operation; use one of {accepted} or 'auto'"
        )
    refusal = refusals[implementation]
    if refusal is not None:
        raise KernelError(
            f"{op}: implementation {implementation!r} {refusal}; these arguments run on {accepted}"
        )
    return implementation


def resolve_interpret(op: str, chosen: str, interpret: Interpret) -> Interpret:
    """Interpretation mode of the chosen implementation.

    None interprets exactly when the default backend is not the kernel's own. Exporting or compiling ahead of
    time for an absent device needs an explicit False.

    Raises:
      KernelError: interpretation was asked for but the chosen implementation is not a kernel.
    """
    if chosen == "xla":
        require(
            not interpret,
            op,
            "interpret applies to the 'tpu' and 'gpu' kernels; implementation 'xla' was chosen",
        )
        return False
    return jax.default_backend() != chosen if interpret is None else interpret
