"""How many nodes of a draft are judged: a menu of widths, what may choose from it, and the pruned draft.

A wider tree has more to accept and a dearer forward, and which is worth more depends on text, batch and
machine. ``Program.widths`` is the menu, compiled once; a :class:`WidthPolicy` chooses an entry every round,
on the device, for the whole batch.

**What may choose.** Let x be drawn from q(. | prefix) and let J be the event that it is judged. If J is a
function of the prefix and of draws that do not depend on x, then x given J is still distributed as q, so
verification emits p; without J the next token is drawn from p itself. If J looks at x, x given J is
distributed as q 1[x in J] / q(J), and the rule, which subtracts q, emits another distribution: judging only
likely tokens emits them too often.

So nodes are ranked by ``Draft.cut_score``, the probability of the prefix *above* a drawn token. No score
exceeds its parent's and ties go to the lower number, so that a token's descendants never decide about it.
A policy chooses between widths by all scores where drafts are a function of the text, and where they are
drawn sees, at each width, no score of a token that this width does not judge but the next one's (``decide``).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Proposal


def menu(widths: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    """The widths that a draft of ``nodes`` can have: ``widths`` and the whole draft at the most, ascending;
    the whole draft alone where ``widths`` is empty."""
    return tuple(sorted({min(w, nodes) for w in widths})) or (nodes,)


def rank(draft: Draft) -> tuple[jax.Array, jax.Array]:
    """The draft's nodes, best first: (node numbers [B, N] int32, their scores [B, N] f32).

    The root comes first and a parent before its child; a draft without ``cut_score`` keeps its order. Nodes
    that are not valid come last, with score 0.
    """
    number = jnp.arange(draft.tokens.shape[1])
    scores = jnp.ones(draft.tokens.shape, jnp.float32) if draft.cut_score is None else draft.cut_score
    scores = jnp.where(number == 0, 1.0, jnp.where(draft.valid, jnp.clip(scores, 0.0, 1.0), -1.0))
    for _ in range(draft.max_depth):
        scores = jnp.minimum(scores, jnp.take_along_axis(scores, draft.parent, axis=1))
    scores, order = jax.lax.top_k(scores, number.shape[0])
    return order.astype(jnp.int32), jnp.maximum(scores, 0.0)


def prune(draft: Draft, width: int, order: jax.Array | None = None) -> tuple[Draft, jax.Array]:
    """The ``width`` best nodes of ``draft``, and their numbers in it [B, width], ascending.

    A kept node's parent is kept and siblings stay in order. ``order``: what :func:`rank` gives, where it is
    known already.
    """
    if width >= draft.tokens.shape[1]:
        return draft, jnp.broadcast_to(jnp.arange(draft.tokens.shape[1], dtype=jnp.int32), draft.tokens.shape)
    best = rank(draft)[0] if order is None else order
    kept = jnp.sort(best[:, :width], axis=1)

    def of_kept(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), axis=1)

    above = of_kept(draft.parent)
    q = draft.proposal.q
    pruned = dataclasses.replace(
        draft,
        tokens=of_kept(draft.tokens),
        # A parent's new number is how many kept nodes come before it.
        parent=jnp.sum(kept[:, None, :] < above[:, :, None], axis=2, dtype=jnp.int32),
        depth=of_kept(draft.depth),
        valid=of_kept(draft.valid),
        proposal=dataclasses.replace(draft.proposal, q=None if q is None else of_kept(q)),
        cut_score=None if draft.cut_score is None else of_kept(draft.cut_score),
        max_depth=min(draft.max_depth, width - 1),
    )
    return pruned, kept


def lone(root: jax.Array) -> Draft:
    """The draft that guesses nothing: ``root`` [B] alone."""
    tokens = root[:, None]
    zeros = jnp.zeros_like(tokens)
    return Draft(tokens, zeros, zeros, jnp.ones(tokens.shape, bool), Proposal(), chain=True)


@pytree.dataclass
class Judged:
    """What became of a round, for a policy to learn from; arrays [B, N], best node first.

    ``drafted`` [] bool: whether anything was drafted. ``width`` [] int32: nodes that were judged. ``scores``
    f32 of the nodes (see :func:`rank`), 0 in rows that are done, of roots alone where nothing was drafted;
    ``depths`` int32; ``judged`` bool: real
    drafts that the target has scored (the root is none, nor is anything of a row that was done);
    ``accepted`` bool: those that it kept.
    """

    drafted: jax.Array
    width: jax.Array
    scores: jax.Array
    depths: jax.Array
    judged: jax.Array
    accepted: jax.Array


MemoryT = TypeVar("MemoryT")
"""What a width policy remembers: a pytree."""


class WidthPolicy(abc.ABC, Generic[MemoryT]):
    """Chooses widths. A frozen, hashable dataclass of settings; its memory is a pytree in the state of
    decoding, one for the whole batch, and all methods run on the device."""

    @abc.abstractmethod
    def init(self, menu: tuple[int, ...]) -> MemoryT:
        """The memory before the first round."""

    def drafts(self, memory: MemoryT, menu: tuple[int, ...]) -> jax.Array:
        """[] bool: whether to draft at all this round. Asked where the menu has a width of 1, which is not
        drafting."""
        del memory, menu
        return jnp.bool_(True)

    @abc.abstractmethod
    def choose(
        self, memory: MemoryT, menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        """[] int32: index into ``menu`` of the width to judge, by the nodes' ``scores`` and ``depths``
        [B, N], best first.

        The root's score is 1, or 0 in a row that is done. A width of 1 leaves a draft unjudged that has been
        paid for. Where drafts are drawn, nodes that may not decide are replaced by the last that may: see
        ``decide``.
        """

    def update(self, memory: MemoryT, menu: tuple[int, ...], judged: Judged) -> MemoryT:
        """The memory after a round, one that did not draft included."""
        del menu, judged
        return memory


@dataclasses.dataclass(frozen=True)
class Widest(WidthPolicy[tuple[()]]):
    """Everything that was drafted is judged."""

    def init(self, menu: tuple[int, ...]) -> tuple[()]:
        """Nothing to remember."""
        del menu
        return ()

    def choose(
        self, memory: tuple[()], menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        """The last entry."""
        del memory, scores, depths
        return jnp.int32(len(menu) - 1)


def decide(
    policy: WidthPolicy[MemoryT],
    memory: MemoryT,
    menu: tuple[int, ...],
    scores: jax.Array,
    depths: jax.Array,
    *,
    drawn: bool,
) -> jax.Array:
    """The policy's choice, [] int32 index into ``menu``, such that no token decides whether
    it is judged.

    ``drawn`` False: the drafts are a function of the text, and so may be any choice by them. True: the widths
    are gone through in ascending order, and whether to go on from one is asked with the nodes that it has and
    the one after it; a node's score and place say nothing of its own token. The first width from which the
    policy does not go on is the choice.
    """
    if not drawn:
        return jnp.clip(policy.choose(memory, menu, scores, depths), 0, len(menu) - 1)
    place = jnp.arange(scores.shape[1])
    level, going = jnp.int32(0), jnp.bool_(True)
    for index in range(len(menu) - 1):
        known = [jnp.where(place <= menu[index], x, x[:, menu[index], None]) for x in (scores, depths)]
        going = going & (policy.choose(memory, menu, *known) > index)
        level = level + going
    return level
