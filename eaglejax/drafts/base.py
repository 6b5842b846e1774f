"""The one interface between a target and whatever guesses its next tokens.

A *proposer* is a frozen, hashable dataclass of settings (a compile-time constant). Its weights travel as
``params`` and its memory as ``state``, both pytrees. ``init``, ``observe`` and ``propose`` run inside jitted
programs, so they hold no Python state, ask nothing of the host, and have shapes that depend on settings and
inputs alone. ``inputs`` and ``learn`` are its host half.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.models.config import Boundary
from eaglejax.sampling import RowSampling, Sampling

ParamsT = TypeVar("ParamsT")
"""A proposer's weights: a pytree, or None."""
StateT = TypeVar("StateT")
"""A proposer's memory: a pytree in whose arrays the first axis is the row."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: the prompt's token ids, how to sample, where to stop, and what the answer may repeat.

    ``stop``: strings before which the answer ends. ``stop_token_ids``: ids that end it as the end of text
    does.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    prediction: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a proposer reads in ``observe``. ``taps``: boundaries of the target, in the order in which
    ``Observation.features`` holds them."""

    taps: tuple[Boundary, ...] = ()


@pytree.dataclass
class Proposal:
    """The distribution that the drafts were drawn from.

    ``q`` None: drafts are a function of the prefix alone (argmax, top-k, lookup), their distribution is
    one-hot. Otherwise ``q`` [B, N, Vd] f32: row i is the distribution from which the children of node i were
    drawn, over the draft vocabulary; ``ids`` [Vd] int32 maps it to target ids (None: the same ids; strictly
    increasing otherwise). ``replacement``: whether siblings are independent draws from the same q (True), or
    each later sibling is drawn from q without the earlier ones (False).
    """

    q: jax.Array | None = None
    ids: jax.Array | None = None
    replacement: bool = pytree.static(default=False)


@pytree.dataclass
class Draft:
    """A tree of guesses a row; node 0 is the root, the last committed token.

    ``tokens``, ``parent``, ``depth`` [B, N] int32, ``valid`` [B, N] bool. ``parent[:, 0] == 0``; a parent
    has a smaller index than its child; siblings are verified in index order. A valid node's parent is valid.
    ``cut_score`` [B, N] f32 or None: by what nodes may be left out, the cumulative probability of the prefix
    above a drawn token, and of the node itself where drafts are a function of the text; the root's is 1 and
    no node's exceeds its parent's. ``max_depth`` (D)
    bounds every row's tree; ``chain`` says that node i always is the only child of node i-1.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    valid: jax.Array
    proposal: Proposal
    cut_score: jax.Array | None = None
    max_depth: int = pytree.static(default=0)
    chain: bool = pytree.static(default=False)


@pytree.dataclass
class Observation:
    """What the target has just committed, with the features the proposer asked for.

    ``tokens`` [B, M] int32 sit at positions ``start[b] + i``; the first ``count[b]`` are real (0: none).
    ``following`` [B, M] is the token after each of them (EAGLE pairs the feature of t with the token t+1);
    the token after the last real one is the new root. ``features`` [B, M, A, H] are the target's at
    ``Needs.taps``, in that order (None where there are none). During a round M = D+1 and the tokens are the
    root and the accepted drafts; during prefill M is the chunk.
    """

    tokens: jax.Array
    following: jax.Array
    start: jax.Array
    count: jax.Array
    features: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A proposer with its weights and nothing else: what ``load_draft`` returns and ``generate`` takes.
    ``source``: the draft as the user named it, for messages."""

    proposer: Proposer
    params: Any = None
    source: str | None = None


class Proposer(abc.ABC, Generic[ParamsT, StateT]):
    """See the module's text. ``nodes`` is N (root included), ``depth`` D, ``chain`` as in Draft.

    ``reads_predictions``: it uses what requests bring as predictions. ``keeps_own_drafts``: ``observe`` takes
    the tokens of a round for a beginning of its own draft, and no other draft may be judged in its place.
    """

    reads_predictions: ClassVar[bool] = False
    keeps_own_drafts: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def nodes(self) -> int: ...

    @property
    @abc.abstractmethod
    def depth(self) -> int: ...

    @property
    @abc.abstractmethod
    def chain(self) -> bool: ...

    @property
    def needs(self) -> Needs:
        """Nothing, unless a proposer says otherwise."""
        return Needs()

    @property
    def draws(self) -> bool:
        """Whether drafts of sampled rows may be drawn, so that their ``Proposal`` has a q. A proposer whose
        drafts are a function of the text says False: then no row's text depends on how many are judged (see
        ``speculate.verify``), and batches that sample may choose widths too."""
        return True

    def inputs(self, requests: Sequence[Request], slots: int) -> Any:
        """On the host: what ``requests`` bring along, as arrays whose first axis is ``slots`` rows.

        The first rows are the requests', the others are empty. Raises ConfigError where a request brings
        something that the proposer does not use. The default uses nothing and gives no arrays.
        """
        del slots
        self.refuse_predictions(requests)
        return ()

    def refuse_predictions(self, requests: Sequence[Request]) -> None:
        """For ``inputs`` of proposers that use none. Raises ConfigError where a request brings one."""
        if any(r.prediction is not None for r in requests):
            raise ConfigError(
                f"predictions are given but {type(self).__name__} does not use them; "
                "decode with proposer=Prediction(...)"
            )

    def learn(self, row: Request, tokens: Sequence[int]) -> None:
        """On the host, between chunks of rounds: ``tokens`` are what ``row`` has emitted since the last call.

        A proposer that remembers texts across requests keeps them in a field that takes no part in
        comparison, and hands them out in ``inputs`` of later requests. The default forgets them.
        """
        del row, tokens

    @abc.abstractmethod
    def init(self, params: ParamsT, *, batch: int, capacity: int, inputs: Any = ()) -> StateT:
        """State before any token: ``capacity`` is the most tokens a row can come to hold, N included.

        ``inputs``, from :meth:`inputs`, become part of it where the proposer has any. The first axis of every
        array is the row, so that a row joins and leaves a batch with all that is its own.
        """

    @abc.abstractmethod
    def observe(self, params: ParamsT, state: StateT, seen: Observation) -> StateT:
        """Take in committed tokens; called once a prefill chunk and once a round."""

    @abc.abstractmethod
    def propose(
        self,
        params: ParamsT,
        state: StateT,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, StateT]:
        """Guess what follows ``root`` [B] int32, which sits at position ``lengths`` [B].

        ``keys`` [B] are typed PRNG keys that no one else draws from. Nodes past the row's end may be
        proposed; the round cuts them.
        """
