"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last state, one for each token ahead."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from eaglejax.drafts.align import Reads
from eaglejax.errors import ConfigError
from eaglejax.models.config import FINAL, Boundary

Output = Literal["each", "shared", "target"]
"""The matrix to the vocabulary: one for each head, one for all, or the target's own."""


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Shape and arithmetic of the heads; hashable, a compile-time constant.

    ``heads`` K: head k guesses the token k + 1 places behind the root. ``layers``: residual blocks of each.
    ``bias``: whether they have one. ``output``: see ``Output``. ``draft_vocab_size``: tokens that the heads
    know. ``logit_scale`` and ``softcap`` are of the logits. ``basis``: id of the basis that the state it
    reads is in, None for the one that the target was trained in. ``feature_map``: the heads ship the map from
    such a state to the one they were trained on.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    heads: int
    layers: int = 1
    bias: bool = True
    output: Output = "each"
    logit_scale: float = 1.0
    softcap: float | None = None
    basis: str | None = None
    feature_map: bool = False

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 1), ("hidden_size", 1), ("heads", 1), ("layers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"Medusa {name} is {getattr(self, name)}; it must be at least {least}")
        if self.layers == 0 and self.output == "target":
            raise ConfigError(
                "Medusa heads without blocks or a matrix of their own would all be the target's"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"Medusa heads of {self.draft_vocab_size} tokens for a target of {self.vocab_size}"
            )
        if self.output not in get_args(Output):
            raise ConfigError(f"output is {self.output!r}; it is one of {', '.join(get_args(Output))}")

    @property
    def reduced(self) -> bool:
        """Whether the heads know only some of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def reach(self, length: int) -> int:
        """Drafts of the longest chain of up to ``length``: one a head."""
        return min(length, self.heads)

    @property
    def target_hidden_size(self) -> int:
        """Their own."""
        return self.hidden_size

    @property
    def taps(self) -> tuple[Boundary, ...]:
        """The state behind the target's final norm."""
        return (FINAL,)

    @property
    def reads(self) -> Reads:
        """What they take from their target."""
        return Reads(("final",), embedding=False, head=self.output == "target")
