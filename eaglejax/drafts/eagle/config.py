"""Architecture of an EAGLE draft: every published variant is a setting of one small decoder.

EAGLE-1 (Li et al. 2024a; EAGLE-2 and HASS share its weights) mixes the token's embedding with the target's
final feature in ``fc`` and predicts the next feature, which the target's own head reads. EAGLE-3 (Li et al.
2025) fuses features of several depths, lets its first layer attend over [embedding, feature] and has a head
of its own. EAGLE-3.1, P-EAGLE (arXiv:2602.01469) and the trainers' variants are flags.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from eaglejax.drafts.align import Feature, Reads
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.config import FINAL, Boundary, ModelConfig
from eaglejax.nn.block import Block, GroupedQuery, Norm
from eaglejax.nn.mlp import activation
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig

AuxNorm = Literal["none", "joined", "each"]


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape and arithmetic of a draft; hashable, a compile-time constant.

    ``version``: 1 (EAGLE-1, EAGLE-2, HASS) or 3. ``vocab_size`` V is the target's (what ``embed`` covers),
    ``draft_vocab_size`` Vd the head's. ``hidden_size`` H is the draft's own width, ``target_hidden_size`` Ht
    the target's.

    EAGLE-3 reads ``num_aux`` target features at the hidden-state boundaries ``aux`` (0 = embedding, i =
    output of block i; empty: not known yet, see ``default_boundaries``), which ``fc`` fuses. With ``num_aux``
    0 it has no ``fc`` and reads the state behind the target's final norm, as EAGLE-1 does (``reads_final``).
    ``aux_norm`` says what is normalised before ``fc``: nothing, the joined features with one weight, or each
    with its own.
    ``norm_before_residual``: the first layer's residual is the normalised feature instead of the raw one.
    ``head_norm``: a final norm stands before the head. ``feed_normed``: the state fed to the next draft step
    is the one after that norm (EAGLE-3.1) instead of the one before it.

    ``own_embedding``, ``own_head``: the draft ships them; else they are the target's. ``target_rows``: a
    draft with a reduced vocabulary and without a head reads the rows of the target's head that stand for its
    tokens; it must be said, because a head that is merely missing looks the same. ``num_experts`` E: 0 for a
    dense MLP of width ``intermediate_size``; otherwise each layer's MLP is a mixture of E experts of width
    ``moe_intermediate_size``, of which a token passes ``experts_per_token``, weighted by the softmax over all
    of them, renormalised; ``intermediate_size`` is then what a token passes through. ``windows``: attention
    window of each layer in positions (None: all; empty: all layers full). ``embed_scale`` multiplies the
    embedding and ``softcap`` caps the logits (target conventions that a draft with borrowed parts follows).
    ``basis``: id of the basis that the features it reads are in, None for the one that the target was trained
    in. ``feature_map`` (where it reads the last state): the file ships the map from such features to those it
    was trained on. ``mask_id`` (EAGLE-3): id of the token that stands for one not known yet, in a draft whose
    steps behind the first are one pass over masks (P-EAGLE); what stands for such a token's features, the
    file ships. None: each step reads the state of the one before.
    """

    version: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_aux: int = 0
    aux: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    activation: str = "silu"
    aux_norm: AuxNorm = "none"
    norm_before_residual: bool = False
    head_norm: bool = False
    feed_normed: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    own_head: bool = False
    target_rows: bool = False
    windows: tuple[int | None, ...] = ()
    embed_scale: float | None = None
    softcap: float | None = None
    basis: str | None = None
    feature_map: bool = False
    mask_id: int | None = None

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ConfigError(
                f"EAGLE version {self.version} is not known; it is 1 (EAGLE-1, EAGLE-2, HASS) or 3"
            )
        for name in (
            "vocab_size",
            "draft_vocab_size",
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_layers",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"draft {name} is {value!r}; it must be a positive integer")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        if self.feed_normed and not self.head_norm:
            raise ConfigError("feed_normed needs head_norm: there is no normalised state to feed back")
        if self.reduced and not (self.own_head or self.target_rows):
            raise ConfigError(
                f"a draft vocabulary of {self.draft_vocab_size} out of {self.vocab_size} needs a head of its "
                "own, or target_rows to say that it reads those rows of the target's"
            )
        if self.target_rows and (self.own_head or not self.reduced):
            raise ConfigError("target_rows is for a reduced draft vocabulary without a head of its own")
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab_size:
            raise ConfigError(
                f"the mask token {self.mask_id} is no row of an embedding of {self.vocab_size} tokens"
            )
        self._check_experts()
        activation(self.activation)
        self.rope.rotary_dim(self.head_dim)
        (self._check_first if self.version == 1 else self._check_third)()

    def _check_experts(self) -> None:
        each = (self.num_experts, self.experts_per_token, self.moe_intermediate_size)
        if not any(each):
            return
        if min(each) < 1:
            raise ConfigError(
                f"num_experts, experts_per_token and moe_intermediate_size are {each}; they are all "
                "positive, or all 0 for a dense MLP"
            )
        passed = self.experts_per_token * self.moe_intermediate_size
        if self.intermediate_size != passed:
            raise ConfigError(
                f"intermediate_size is {self.intermediate_size}; {self.experts_per_token} experts of "
                f"{self.moe_intermediate_size} make {passed}, the width that a token passes through"
            )
        if not self.experts_per_token < self.num_experts:
            raise ConfigError(
                f"{self.experts_per_token} experts a token of {self.num_experts} leave nothing to choose; "
                "use a dense MLP or more experts"
            )

    def _check_first(self) -> None:
        if self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"an EAGLE-1 draft predicts the target's features, so its hidden size "
                f"{self.hidden_size} must be the target's {self.target_hidden_size}"
            )
        for name in ("aux", "num_aux", "norm_before_residual", "head_norm", "parallel"):
            if getattr(self, name):
                raise ConfigError(f"an EAGLE-1 draft has no {name}; that is an EAGLE-3 setting")
        if self.aux_norm != "none" or self.reduced:
            raise ConfigError(
                "an EAGLE-1 draft has neither feature norms nor a reduced vocabulary (EAGLE-3 does)"
            )

    def _check_third(self) -> None:
        if self.reads_final:
            if self.aux_norm != "none" or self.fc_bias or self.hidden_size != self.target_hidden_size:
                raise ConfigError(
                    "an EAGLE-3 draft without features to fuse (num_aux 0) reads the target's last state as "
                    "it is: it has no aux_norm, no fc and the target's hidden size"
                )
        elif self.feature_map:
            raise ConfigError("a draft that fuses features has no feature_map: it is folded into fc")
        if self.num_aux < 0:
            raise ConfigError(f"num_aux is {self.num_aux}; it counts features")
        if self.aux and len(self.aux) != self.num_aux:
            raise ConfigError(
                f"{len(self.aux)} boundaries {list(self.aux)} for a draft that fuses {self.num_aux}"
            )
        if len(set(self.aux)) != len(self.aux) or any(i < 0 for i in self.aux):
            raise ConfigError(f"boundaries {list(self.aux)} must be distinct and not negative")
        for owns, what in ((self.own_embedding, "embedding"), (self.own_head, "head")):
            if not owns and self.hidden_size != self.target_hidden_size:
                raise ConfigError(
                    f"the draft is {self.hidden_size} wide and the target {self.target_hidden_size}: it "
                    f"cannot borrow the target's {what} and must ship its own"
                )

    @property
    def taps(self) -> tuple[Boundary, ...]:
        """What it reads of the target: the state behind the final norm (EAGLE-1), or ``aux`` (EAGLE-3; empty
        while that is open)."""
        return (FINAL,) if self.reads_final else self.aux

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def moe(self) -> MoeConfig | None:
        """How the MLP's experts are chosen and mixed, None for a dense one."""
        if not self.num_experts:
            return None
        return MoeConfig(
            self.num_experts,
            self.experts_per_token,
            self.moe_intermediate_size,
            scores="softmax",
            normalize=True,
        )

    @property
    def parallel(self) -> bool:
        """Whether all steps behind the first are one pass over masks."""
        return self.mask_id is not None

    @property
    def reads_final(self) -> bool:
        """Whether the target's state behind its final norm is the feature, instead of boundaries."""
        return self.num_aux == 0

    @property
    def reads(self) -> Reads:
        """What it takes from its target."""
        boundary: Feature = "boundary"
        features: tuple[Feature, ...] = ("final",) if self.reads_final else (boundary,) * self.num_aux
        return Reads(features, embedding=not self.own_embedding, head=not self.own_head)

    @property
    def fc_in(self) -> int:
        """Rows of ``fc``: [embedding, feature] for EAGLE-1, the joined features for EAGLE-3; 0: no ``fc``."""
        return 2 * self.hidden_size if self.version == 1 else self.num_aux * self.target_hidden_size

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in positions, None for full attention."""
        return self.windows[layer] if self.windows else None

    def block(self, layer: int) -> Block:
        """A layer in full, as ``nn.block`` runs it. EAGLE-3's first one reads [embedding, feature]; what a
        mixer reads is normalised by the draft, which is why no layer has ``attn_norm``."""
        return Block(
            hidden=self.hidden_size,
            mixer=GroupedQuery(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                rope=self.rope,
                window=self.window(layer),
                qkv_bias=self.qkv_bias,
                o_bias=self.o_bias,
                qk_norm=self.qk_norm,
            ),
            feed=self.moe or self.intermediate_size,
            activation=self.activation,
            norm=Norm(self.norm_eps),
            wide=2 * self.hidden_size if self.version == 3 and layer == 0 else None,
            own_norm=False,
            router_f32=True,
        )

    def fit(self, target: ModelConfig) -> EagleConfig:
        """This draft on ``target``: boundaries filled in where the checkpoint leaves them open.

        Raises MismatchError that names what does not fit (vocabulary, hidden size, boundaries).
        """
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
        config = dataclasses.replace(self, softcap=self.softcap if self.own_head else target.final_softcap)
        if self.reads_final:
            return config
        aux = self.aux or default_boundaries(target.num_layers)
        if len(aux) != self.num_aux:
            raise MismatchError(
                f"the draft fuses {self.num_aux} features and its checkpoint does not say of which "
                f"layers; the usual choice {list(aux)} has {len(aux)}. Name the boundaries"
            )
        if max(aux) > target.num_layers:
            raise MismatchError(
                f"boundary {max(aux)} of {list(aux)} does not exist: the target has {target.num_layers} "
                f"layers "
                f"(boundaries 0..{target.num_layers}); is the aux convention right?"
            )
        return dataclasses.replace(config, aux=aux)


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """Boundaries that EAGLE-3 reads when a checkpoint names none: {2, n // 2, n - 3} of an n-layer target,
    ascending.

    Raises MismatchError where they coincide or leave the model, as for shallow targets.
    """
    low, middle, high = sorted((2, num_layers // 2, num_layers - 3))
    aux = (low, middle, high)
    if low < 0 or len(set(aux)) < 3:
        raise MismatchError(
            f"a target of {num_layers} layers is too shallow for the usual EAGLE-3 boundaries {list(aux)}; "
            "name three distinct ones"
        )
    return aux
