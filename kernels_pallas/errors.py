"""The one error this package raises on bad input."""

from typing import Any


class KernelError(ValueError):
    """Shapes, dtypes or options that an operation or one of its implementations does not take.

    The message names the operation, what was given and what would be accepted.
    """

    def __new__(cls, *args: Any) -> "KernelError":
        """An instance of what `raise_as` named."""
        return super().__new__(_kind if cls is KernelError else cls, *args)


_kind: type[KernelError] = KernelError


def raise_as(kind: type[KernelError]) -> None:
    """Raise `kind` wherever this package raises `KernelError`.

    A library that stands on these kernels names its own kind of it, whose bases are its own errors too: its
    users then catch a kernel's refusal with everything else, and these modules know nothing of it.
    """
    global _kind
    _kind = kind


def require(condition: bool, op: str, message: str) -> None:
    """Raise `KernelError` naming the operation unless the condition holds."""
    if not condition:
        raise KernelError(f"{op}: {message}")
