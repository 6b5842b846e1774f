"""The one error this package raises on bad input."""


class KernelError(ValueError):
    """Shapes, dtypes or options that an operation or one of its implementations does not take.

    The message names the operation, what was given and what would be accepted.
    """


def require(condition: bool, op: str, message: str) -> None:
    """Raise `KernelError` naming the operation unless the condition holds."""
    if not condition:
        raise KernelError(f"{op}: {message}")
