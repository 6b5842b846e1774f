"""Pallas kernels for TPU and GPU, each beside a plain jnp reference. Imports jax alone.

Every operation has one face that takes `implementation` ("auto", "xla", "tpu" or "gpu") and `interpret`; the
arithmetic of each, counted by hand against chips, is in docs/kernels.md.
"""

from kernels_pallas.errors import KernelError

__all__ = ["KernelError"]
