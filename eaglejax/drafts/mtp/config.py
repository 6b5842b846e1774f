"""Architecture of an MTP draft: modules that a target was trained with to predict further tokens
(DeepSeek-V3, arXiv:2412.19437), each of them one layer of the target's own kind.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from eaglejax.drafts.align import Reads
from eaglejax.errors import ConfigError
from eaglejax.models.config import FINAL, Boundary
from eaglejax.nn.block import Block

Recycle = Literal["post_norm", "pre_norm"]
"""Which of a module's states the next step reads: the one behind its last norm, or the residual stream before
it."""


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """Shape and arithmetic of a draft; hashable, a compile-time constant.

    ``modules`` D: step k runs module k modulo D, so that one module is asked again and again. ``block``: the
    layer of each, as a target's is. ``recycle``: see ``Recycle``. ``own_embedding``: the draft ships one for
    all modules; ``own_head``: each module has a head; else they are the target's. ``embed_scale``,
    ``softcap``: the target's conventions. ``basis``: id of the basis that the features it reads are in, None
    for the one that the target was trained in. ``feature_map``: the draft ships the map from such features to
    those it was trained on.
    """

    vocab_size: int
    hidden_size: int
    block: Block
    modules: int = 1
    recycle: Recycle = "post_norm"
    own_embedding: bool = False
    own_head: bool = False
    embed_scale: float | None = None
    softcap: float | None = None
    basis: str | None = None
    feature_map: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "modules"):
            if getattr(self, name) < 1:
                raise ConfigError(f"MTP {name} is {getattr(self, name)}; it must be at least 1")
        if self.recycle not in get_args(Recycle):
            raise ConfigError(f"recycle is {self.recycle!r}; it is one of {', '.join(get_args(Recycle))}")
        if self.block.hidden != self.hidden_size:
            raise ConfigError(f"a layer of width {self.block.hidden} in a draft of width {self.hidden_size}")

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.vocab_size

    def reach(self, length: int) -> int:
        """Drafts of the longest chain of up to ``length``: beyond the modules a multiple of their number."""
        return length if length <= self.modules else length - length % self.modules

    @property
    def target_hidden_size(self) -> int:
        """Its own."""
        return self.hidden_size

    @property
    def taps(self) -> tuple[Boundary, ...]:
        """The state behind the target's final norm."""
        return (FINAL,)

    @property
    def reads(self) -> Reads:
        """What it takes from its target."""
        return Reads(("final",), embedding=not self.own_embedding, head=not self.own_head)
