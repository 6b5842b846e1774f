"""A kernel's refusal as one of eaglejax's."""

from __future__ import annotations

from eaglejax.errors import ConfigError
from kernels_pallas import errors


class KernelError(ConfigError, errors.KernelError):
    """Shapes, dtypes or options that a kernel does not take, named by the kernel."""


def adopt() -> None:
    """Let the kernels raise it."""
    errors.raise_as(KernelError)
