"""The border between a target's features and a draft.

A draft meets features from two sources: those the *target* computed for committed tokens and those the *draft
itself* predicted further down its tree. They may live in different bases (a target whose residual stream was
rotated still feeds a draft trained on the original one), so each source has its own linear map.
"""

from __future__ import annotations

import jax

from eaglejax import pytree
from eaglejax.nn.linear import linear


@pytree.dataclass
class FeatureAdapter:
    """Linear maps in front of a draft; None is the identity and costs nothing.

    ``target``: one map [Ht, Ht] a feature that the draft reads from the target (A of them for EAGLE-3, one
    for EAGLE-1), or empty for identity everywhere; it is applied in the map's dtype. ``draft`` [H, H]: for
    the states the draft feeds back to itself.
    """

    target: tuple[jax.Array | None, ...] = ()
    draft: jax.Array | None = None

    def from_target(self, features: jax.Array) -> jax.Array:
        """``features`` [B, M, A, Ht] as the target computed them -> the same shape in the draft's basis."""
        if not any(m is not None for m in self.target):
            return features
        parts = [features[:, :, i] for i in range(features.shape[2])]
        mapped = [
            x if m is None else linear(x.astype(m.dtype), m) for x, m in zip(parts, self.target, strict=True)
        ]
        return jax.numpy.stack(mapped, axis=2)

    def from_draft(self, state: jax.Array) -> jax.Array:
        """``state`` [..., H] that the draft predicted -> what its next step reads."""
        return state if self.draft is None else linear(state, self.draft)
