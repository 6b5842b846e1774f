"""Root-mean-square normalisation (Zhang & Sennrich 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas import rms_norm as kernel


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, offset: bool = False) -> jax.Array:
    """Scale ``x`` [..., H] to unit root mean square and multiply by ``weight`` [H]; result in x's dtype.

    Everything happens in f32. ``offset`` says that the stored weight is the distance from one (Gemma).
    """
    w = weight.astype(jnp.float32)
    return kernel.rms_norm(x, 1.0 + w if offset else w, eps)
