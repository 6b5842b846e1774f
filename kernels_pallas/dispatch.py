"""Which implementation of an operation runs, and whether a kernel is interpreted.

An operation lists its ways of computing a result, and `run` takes one: the one place where "auto" is decided,
a name is taken or refused, and a CPU kernel is put beside what other devices run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from kernels_pallas.errors import KernelError, require
from kernels_pallas.foreign import portable_call

Implementation = Literal["auto", "xla", "tpu", "gpu", "cpu"]
# Why an implementation does not take its arguments, or None; a function where finding out takes time.
Refusal = str | None | Callable[[], str | None]
# True is the generic Pallas interpreter; `pltpu.InterpretParams` and its GPU twin are the machine simulators.
Interpret = bool | Any | None


@dataclasses.dataclass(frozen=True)
class Way:
    """One implementation of an operation for the arguments at hand.

    `call` takes them in the order of `run`, the "tpu" and "gpu" ones `interpret` by name besides. `refusal`:
    why it does not take them. `unasked`: why "auto" leaves it although it does.
    """

    call: Callable[..., Any]
    refusal: Refusal = None
    unasked: Refusal = None


def run(
    op: str,
    ways: Mapping[str, Way],
    arguments: tuple[Any, ...],
    implementation: str = "auto",
    interpret: Interpret = None,
) -> Any:
    """What `implementation` gives for `arguments`; `ways` has "xla" and whatever else the operation has.

    Raises:
      KernelError: see `choose` and `resolve_interpret`.
    """
    chosen = choose(op, implementation, {name: way.refusal for name, way in ways.items()})
    if implementation == "auto" and _ask(ways[chosen].unasked) is not None:
        chosen = "xla"
    interpret = resolve_interpret(op, chosen, interpret)
    call = ways[chosen].call
    if chosen in ("tpu", "gpu"):
        return call(*arguments, interpret=interpret)
    if chosen == "cpu" and implementation == "auto":
        # What "auto" traces here may be compiled for a device that is not.
        return portable_call(call, ways["xla"].call, *arguments)
    return call(*arguments)


def choose(op: str, implementation: str, refusals: Mapping[str, Refusal]) -> str:
    """Pick "xla", "tpu", "gpu" or "cpu".

    Args:
      op: name of the operation, for messages.
      implementation: what the caller asked for. "auto" takes the kernel of the default backend, TPU or CPU,
        when the operation has one that accepts the arguments, and "xla" otherwise; any other name is taken or
        refused, never replaced.
      refusals: for each implementation the operation has, whether it takes these arguments.

    Raises:
      KernelError: unknown name, or the named implementation refuses; names those that accept.
    """
    if implementation == "auto":
        # The GPU kernels have run in simulation alone, so they are taken by name only.
        own = jax.default_backend()
        return own if own in ("tpu", "cpu") and own in refusals and _ask(refusals[own]) is None else "xla"
    if implementation in refusals and (refusal := _ask(refusals[implementation])) is None:
        return implementation
    accepted = [name for name, refusal in refusals.items() if _ask(refusal) is None]
    if implementation not in refusals:
        raise KernelError(
            f"{op}: no implementation {implementation!r} for this operation; use one of {accepted} or 'auto'"
        )
    raise KernelError(f"{op}: implementation {implementation!r} {refusal}; these arguments run on {accepted}")


def _ask(refusal: Refusal) -> str | None:
    return refusal() if callable(refusal) else refusal


def resolve_interpret(op: str, chosen: str, interpret: Interpret) -> Interpret:
    """Interpretation mode of the chosen implementation.

    None interprets exactly when the default backend is not the kernel's own. Exporting or compiling ahead of
    time for an absent device needs an explicit False.

    Raises:
      KernelError: interpretation was asked for but the chosen implementation is not a kernel.
    """
    if chosen in ("xla", "cpu"):
        require(
            not interpret,
            op,
            f"interpret applies to the 'tpu' and 'gpu' kernels; implementation {chosen!r} was chosen",
        )
        return False
    return jax.default_backend() != chosen if interpret is None else interpret
