"""Architecture of a DFlash draft (arXiv:2602.06036): a few layers that guess a block of tokens in one pass.

The target's states of several depths, fused, are the context; what attends to it is a block of the last
committed token and masks, whose tokens see each other.
"""

from __future__ import annotations

import dataclasses

from eaglejax.drafts.align import Feature, Reads
from eaglejax.drafts.limits import MOST_DEPTH, check_count
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.config import Boundary, ModelConfig
from eaglejax.nn.block import Block, GroupedQuery, Norm
from eaglejax.nn.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Shape and arithmetic of a draft; hashable, a compile-time constant.

    ``aux``: hidden-state boundaries of the target that ``fc`` fuses. ``block`` B: tokens of a block, the last
    committed one included, so that B - 1 are guessed. ``mask_id``: whose embedding stands for an unknown
    token, unless the draft ships that vector (``mask_vector``). ``from_anchor``: slot i guesses the token
    behind it, beginning with the committed one's; else slot i guesses the one in its own place. ``windows``:
    attention window of each layer in positions (None: all; empty: all layers full); ``causal``: which layers
    do not look ahead within the block (empty: none). ``own_embedding``, ``own_head``: the draft ships them;
    else they are the target's. ``embed_scale``, ``softcap``: the target's conventions. ``basis``: id of the
    basis that the features it reads are in.
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    aux: tuple[int, ...]
    block: int
    mask_id: int = 0
    mask_vector: bool = False
    from_anchor: bool = False
    norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    activation: str = "silu"
    qk_norm: bool = True
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    own_embedding: bool = False
    own_head: bool = False
    embed_scale: float | None = None
    softcap: float | None = None
    basis: str | None = None

    def __post_init__(self) -> None:
        check_count(
            "a DFlash block, which counts the last committed token,", self.block, MOST_DEPTH + 1, least=2
        )
        if not self.aux or len(set(self.aux)) != len(self.aux) or min(self.aux) < 0:
            raise ConfigError(f"boundaries {list(self.aux)} must be distinct, not negative and at least one")
        for name in ("windows", "causal"):
            if getattr(self, name) and len(getattr(self, name)) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        if self.mask_vector:
            object.__setattr__(self, "mask_id", 0)  # one spelling, so that equal drafts are equal
        if not self.mask_vector and not 0 <= self.mask_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id {self.mask_id} is no row of an embedding of {self.vocab_size} tokens"
            )
        if self.hidden_size != self.target_hidden_size and not (self.own_embedding and self.own_head):
            raise ConfigError(
                f"the draft is {self.hidden_size} wide and the target {self.target_hidden_size}: it cannot "
                "borrow the target's embedding or head and must ship its own"
            )

    def reach(self, length: int) -> int:
        """Drafts of the longest chain of up to ``length``: those of a block."""
        return min(length, self.block - 1)

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.vocab_size

    @property
    def taps(self) -> tuple[Boundary, ...]:
        """The boundaries that it fuses."""
        return self.aux

    @property
    def reads(self) -> Reads:
        """What it takes from its target."""
        each: Feature = "boundary"
        features = (each,) * len(self.aux)
        return Reads(features, embedding=not self.own_embedding, head=not self.own_head)

    def layer(self, index: int) -> Block:
        """A layer in full, as ``nn.block`` runs it."""
        return Block(
            hidden=self.hidden_size,
            mixer=GroupedQuery(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                rope=self.rope,
                window=self.windows[index] if self.windows else None,
                qkv_bias=self.attention_bias,
                o_bias=self.attention_bias,
                qk_norm=self.qk_norm,
            ),
            feed=self.intermediate_size,
            activation=self.activation,
            norm=Norm(self.norm_eps),
        )

    def looks_ahead(self, index: int) -> bool:
        """Whether the tokens of a block see each other in a layer, or those before them alone."""
        return not (self.causal and self.causal[index])

    def fit(self, target: ModelConfig) -> DFlashConfig:
        """This draft on ``target``. Raises MismatchError that names what does not fit."""
        if self.vocab_size != target.vocab_size:
            raise MismatchError(
                f"the draft was made for a vocabulary of {self.vocab_size} tokens, the target has "
                f"{target.vocab_size}: it belongs to another model"
            )
        if self.target_hidden_size != target.hidden_size:
            raise MismatchError(
                f"the draft reads features of width {self.target_hidden_size}, the target's are "
                f"{target.hidden_size} wide"
            )
        if max(self.aux) > target.num_layers:
            raise MismatchError(
                f"boundary {max(self.aux)} of {list(self.aux)} does not exist: the target has "
                f"{target.num_layers} layers (boundaries 0..{target.num_layers})"
            )
        scale = self.embed_scale if self.own_embedding else target.embed_scale
        softcap = self.softcap if self.own_head else target.final_softcap
        return dataclasses.replace(self, embed_scale=scale, softcap=softcap)
