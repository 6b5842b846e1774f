"""The one interface between a target and whatever guesses its next tokens.

A *proposer* is a frozen, hashable dataclass of settings (a compile-time constant). Its weights travel as
``params`` and its memory as ``state``, both pytrees; everything below runs inside one jitted round, so it
holds no Python state, asks nothing of the host, and has shapes that depend on its settings alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from eaglejax import pytree
from eaglejax.sampling import RowSampling


@dataclasses.dataclass(frozen=True)
class Needs:
    """Target features a proposer reads in ``observe``.

    ``aux``: hidden-state boundaries (0 = embedding, i = output of the i-th block, residual stream before any
    final norm). ``hidden``: the post-final-norm hidden state that feeds the target's head.
    """

    aux: tuple[int, ...] = ()
    hidden: bool = False


@pytree.dataclass
class Proposal:
    """The law that the drafts were drawn from.

    ``q`` None: drafts are a function of the prefix alone (argmax, top-k, lookup), their law is one-hot.
    Otherwise ``q`` [B, N, Vd] f32: row i is the law from which the children of node i were drawn, over the
    draft vocabulary; ``ids`` [Vd] int32 maps it to target ids (None: the same ids; strictly increasing
    otherwise). ``replacement``: whether siblings are independent draws from the same q (True), or each later
    sibling is drawn from q without the earlier ones (False).
    """

    q: jax.Array | None = None
    ids: jax.Array | None = None
    replacement: bool = pytree.static(default=False)


@pytree.dataclass
class Draft:
    """A tree of guesses a row; node 0 is the root, the last committed token.

    ``tokens``, ``parent``, ``depth`` [B, N] int32, ``valid`` [B, N] bool. ``parent[:, 0] == 0``; a parent
    has a smaller index than its child; siblings are verified in index order. A valid node's parent is valid.
    ``confidence`` [B, N] f32 or None: the draft's own cumulative probability of each node. ``max_depth`` (D)
    bounds every row's tree; ``chain`` says that node i always is the only child of node i-1.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    valid: jax.Array
    proposal: Proposal
    confidence: jax.Array | None = None
    max_depth: int = pytree.static(default=0)
    chain: bool = pytree.static(default=False)


@pytree.dataclass
class Observation:
    """What the target has just committed, with the features the proposer asked for.

    ``tokens`` [B, M] int32 sit at positions ``start[b] + i``; the first ``count[b]`` are real (0: none).
    ``following`` [B, M] is the token after each of them (EAGLE pairs the feature of t with the token t+1);
    the token after the last real one is the new root. ``aux`` [B, M, A, H] and ``hidden`` [B, M, H] as asked
    for in ``Needs``, else None. During a round M = D+1 and the tokens are the root and the accepted drafts;
    during prefill M is the chunk.
    """

    tokens: jax.Array
    following: jax.Array
    start: jax.Array
    count: jax.Array
    aux: jax.Array | None = None
    hidden: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Bound:
    """A proposer with its weights: what ``load_draft`` returns and ``generate`` takes."""

    proposer: Proposer
    params: Any = None


class Proposer(Protocol):
    """See the module's text. ``nodes`` is N (root included), ``depth`` D, ``chain`` as in Draft."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def chain(self) -> bool: ...

    @property
    def needs(self) -> Needs: ...

    def init(self, params: Any, *, batch: int, capacity: int) -> Any:
        """State before any token: ``capacity`` is the most tokens a row can come to hold, N included."""

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        """Take in committed tokens; called once a prefill chunk and once a round."""

    def propose(
        self, params: Any, state: Any, root: jax.Array, lengths: jax.Array, rows: RowSampling, keys: jax.Array
    ) -> tuple[Draft, Any]:
        """Guess what follows ``root`` [B] int32, which sits at position ``lengths`` [B].

        ``keys`` [B] are typed PRNG keys that no one else draws from. Nodes past the row's end may be
        proposed; the round cuts them.
        """
