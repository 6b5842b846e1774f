"""Verification: which path of a draft tree to keep and what follows it, so that the distribution stays the
target's.

Notation: p is the target's distribution after the sampling transform, q the distribution that a draft token
was drawn from. A node's children are tried in the order of their numbers.

One-hot q (a proposal that is a function of the prefix): the next token is drawn from p itself, with a key of
its position alone, and the child that equals it is accepted. A child x passes with probability p(x), the most
that any rule can give it, and the text is the one that plain decoding draws with the same seed: what is
proposed, and how much of it is judged, decides about speed and about nothing else.

Sampled q: recursive rejection sampling (Leviathan et al., arXiv:2211.17192, for one child; SpecInfer,
arXiv:2305.09781, for several). With r = p at first, child x is accepted with probability min(1, r(x) /
q(x)); a refusal leaves r <- max(r - q, 0), renormalised. Siblings without replacement have q <- q without
the earlier ones.

Block verification (Sun et al., arXiv:2403.10444, Algorithm 2) decides on a sampled chain's tokens jointly,
and accepts at least as many in expectation; for one-hot q nothing accepts more than the rule above.

Numbers: a uniform u in (0, 1) accepts when u < ratio, strictly, so a token of probability zero never
passes. When a residual has no mass left (p == q up to rounding, where a refusal has probability zero in
exact arithmetic) p itself is drawn from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Proposal
from eaglejax.errors import ConfigError
from eaglejax.sampling import Cut, Purpose, RowSampling, cut, draw, fold, greedy, prob, round_keys, uniforms
from eaglejax.sampling_edge import mass

METHODS = ("token", "block")


@pytree.dataclass
class Verdict:
    """``path`` [B, D+1] int32: nodes kept, from the root on; entries past ``accepted`` [B] int32 repeat the
    last one, so all are valid indices. ``next_token`` [B] int32 follows the last kept node and is the next
    root."""

    path: jax.Array
    accepted: jax.Array
    next_token: jax.Array


def verify(
    processed: jax.Array, draft: Draft, rows: RowSampling, lengths: jax.Array, *, method: str = "token"
) -> Verdict:
    """Judge ``draft`` by ``processed`` [B, N, V] f32, the target's logits after :func:`sampling.process`.

    ``lengths`` [B] int32: the roots' positions, of which the keys of all draws are made
    (:func:`eaglejax.sampling.round_keys`), each folding in its own purpose. ``method`` "block" verifies a
    sampled chain jointly. Greedy rows keep the longest path of argmax tokens, whatever the proposal. Raises
    ConfigError for another method, for block verification of a tree, and for a chain whose depth is not its
    number of drafts.
    """
    _check(draft, method)
    if rows.sampled and draft.proposal.q is None:
        return _draw_and_match(processed, draft, rows, lengths)
    keys = round_keys(rows, lengths)
    best = greedy(processed)
    matches = draft.tokens == jnp.take_along_axis(best, draft.parent, axis=1)
    if not rows.sampled:
        path, accepted = _walk(draft, matches)
        return Verdict(path, accepted, _at(best, path[:, -1]))

    cuts = cut(processed, rows)
    luck = uniforms(fold(keys, Purpose.ACCEPT), draft.tokens.shape[1])
    scale = jnp.ones_like(rows.temperature)
    rest = None
    if method == "block":
        passed, scale = _block(processed, draft, cuts, luck)
    elif draft.chain:
        q = _child_q(draft)
        passed = (q > 0) & (luck * q < _child_p(processed, draft, cuts))
    else:
        passed, rest = _siblings(processed, draft, cuts, luck)

    sampled = rows.temperature > 0
    path, accepted = _walk(draft, jnp.where(sampled[:, None], passed, matches))
    last = path[:, -1]
    tried = _children(draft, last)
    p = prob(_at(processed, last), _at_node(cuts, last))
    if rest is None:
        assert draft.proposal.q is not None
        spent = jnp.where(jnp.any(tried, axis=1)[:, None], _at(draft.proposal.q, last), 0.0)
        left = scale[:, None] * p
        left = _put(left, draft.proposal, jnp.maximum(_pick(left, draft.proposal) - spent, 0.0))
    else:
        left = _put(p, draft.proposal, rest)
    weights = jnp.where((mass(left) > 0)[:, None], left, p)
    purpose = jnp.where(jnp.any(tried, axis=1), int(Purpose.RESIDUAL), int(Purpose.BONUS))
    token = jnp.where(sampled, draw(weights, fold(keys, purpose)), _at(best, last))
    return Verdict(path, accepted, token)


def _check(draft: Draft, method: str) -> None:
    if method not in METHODS:
        raise ConfigError(f"verification method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "block" and not draft.chain:
        raise ConfigError("block verification is for chains; this proposer drafts a tree: use method 'token'")
    if draft.chain and draft.max_depth != draft.tokens.shape[1] - 1:
        raise ConfigError(f"a chain of {draft.tokens.shape[1]} nodes cannot have max_depth={draft.max_depth}")


def _at(x: jax.Array, node: jax.Array) -> jax.Array:
    """Entry ``node`` [B] of ``x`` [B, N, ...]: [B, ...]."""
    return jax.vmap(lambda row, i: row[i])(x, node)


def _children(draft: Draft, node: jax.Array) -> jax.Array:
    """Which nodes [B, N] are valid children of ``node`` [B]."""
    late = jnp.arange(draft.tokens.shape[1]) > 0
    return draft.valid & late & (draft.parent == node[:, None])


def _walk(draft: Draft, passed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Follow the first child that ``passed`` [B, N] from the root on: path [B, D+1] and its drafts [B]."""
    node = jnp.zeros(passed.shape[0], jnp.int32)
    path, accepted = [node], jnp.zeros_like(node)
    for _ in range(draft.max_depth):
        open_ = _children(draft, node) & passed
        found = jnp.any(open_, axis=1)
        node = jnp.where(found, jnp.argmax(open_, axis=1).astype(jnp.int32), node)
        accepted = accepted + found
        path.append(node)
    return jnp.stack(path, axis=1), accepted


def _at_node(cuts: Cut, node: jax.Array) -> Cut:
    """The distribution at ``node`` [B], to broadcast against its logits [B, V]."""
    return jax.tree.map(lambda x: _at(x, node)[:, None], cuts)


def _child_p(processed: jax.Array, draft: Draft, cuts: Cut) -> jax.Array:
    """p of every node's token at its parent [B, N] (the root's entry means nothing)."""
    row = jnp.arange(draft.tokens.shape[0])[:, None]
    logits = processed[row, draft.parent, draft.tokens]
    above = jax.tree.map(lambda x: jnp.take_along_axis(x, draft.parent, axis=1), cuts)
    return prob(logits, above)


def _pick(x: jax.Array, proposal: Proposal) -> jax.Array:
    """``x`` [..., V] at the draft's vocabulary: [..., Vd]."""
    assert proposal.q is not None
    return x[..., : proposal.q.shape[-1]] if proposal.ids is None else x[..., proposal.ids]


def _put(x: jax.Array, proposal: Proposal, inside: jax.Array) -> jax.Array:
    """``x`` [B, V] with ``inside`` [B, Vd] in place of its values at the draft's vocabulary."""
    if proposal.ids is None:
        return inside if inside.shape == x.shape else x.at[:, : inside.shape[1]].set(inside)
    return x.at[:, proposal.ids].set(inside, unique_indices=True, indices_are_sorted=True)


def _slot(draft: Draft) -> tuple[jax.Array, jax.Array]:
    """Place [B, N] of every node's token in the draft's vocabulary, and whether it is there at all."""
    q, ids = draft.proposal.q, draft.proposal.ids
    assert q is not None
    if ids is None:
        return jnp.minimum(draft.tokens, q.shape[-1] - 1), draft.tokens < q.shape[-1]
    slot = jnp.minimum(jnp.searchsorted(ids, draft.tokens), ids.shape[0] - 1)
    return slot, ids[slot] == draft.tokens


def _child_q(draft: Draft) -> jax.Array:
    """q of every node's token at its parent [B, N]; 0 for a token outside the draft's vocabulary."""
    assert draft.proposal.q is not None
    slot, known = _slot(draft)
    return jnp.where(known, draft.proposal.q[jnp.arange(slot.shape[0])[:, None], draft.parent, slot], 0.0)


def _draw_and_match(processed: jax.Array, draft: Draft, rows: RowSampling, lengths: jax.Array) -> Verdict:
    """The path of tokens that p draws by itself, as far as the draft foresaw them; at greedy rows their
    argmax. A step over all rows at a time, as many as the longest path takes."""
    best, cuts, sampled = greedy(processed), cut(processed, rows), rows.temperature > 0

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        path, node, accepted, _, _ = carry
        p = prob(_at(processed, node), _at_node(cuts, node))
        keys = fold(round_keys(rows, lengths + accepted), Purpose.BONUS)
        token = jnp.where(sampled, draw(p, keys), _at(best, node))
        fits = _children(draft, node) & (draft.tokens == token[:, None])
        found = jnp.any(fits, axis=1)
        node = jnp.where(found, jnp.argmax(fits, axis=1).astype(jnp.int32), node)
        accepted = accepted + found
        path = jnp.where(jnp.arange(path.shape[1]) >= accepted[:, None], node[:, None], path)
        return path, node, accepted, token, jnp.any(found)

    root = jnp.zeros(processed.shape[0], jnp.int32)
    path = jnp.zeros((root.shape[0], draft.max_depth + 1), jnp.int32)
    carry = (path, root, root, root, jnp.bool_(True))
    # A row that has stopped draws the same token again with the same key, and finds no child again.
    path, _, accepted, token, _ = jax.lax.while_loop(lambda carry: carry[-1], step, carry)
    return Verdict(path, accepted, token)


@pytree.dataclass
class _Trial:
    """Where recursive rejection stands: the ``node`` [B] reached, the residual ``left`` [B, Vd] on the
    draft's vocabulary, its mass ``outside`` [B] it, and the next child's distribution ``q`` [B, Vd],
    unnormalised."""

    node: jax.Array
    left: jax.Array
    outside: jax.Array
    q: jax.Array


def _refuse(trial: _Trial, token: jax.Array, luck: jax.Array, replacement: bool) -> tuple[jax.Array, _Trial]:
    """Try child ``token`` [B], a place in the draft's vocabulary (Vd: in none): whether it passes [B], and
    where the trial stands if it does not."""
    row = jnp.arange(token.shape[0])
    supply = mass(trial.q)
    # The residual is never renormalised; q is brought to its scale instead.
    factor = (mass(trial.left) + trial.outside) / jnp.where(supply > 0, supply, 1.0)
    q = trial.q * factor[:, None]
    q_token = q.at[row, token].get(mode="fill", fill_value=0.0)
    passed = (q_token > 0) & (luck * q_token < trial.left.at[row, token].get(mode="fill", fill_value=0.0))
    rest = jnp.maximum(trial.left - q, 0.0)
    left = jnp.where((mass(rest) + trial.outside > 0)[:, None], rest, trial.left)
    later = trial.q if replacement else trial.q.at[row, token].set(0.0, mode="drop")
    return passed, dataclasses.replace(trial, left=left, q=later)


def _siblings(processed: jax.Array, draft: Draft, cuts: Cut, luck: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Recursive rejection over a tree drawn from q: nodes that passed [B, N], and the residual [B, Vd] over
    the draft's vocabulary at the last one, on the scale on which p outside that vocabulary is untouched.

    One scan over the nodes: a parent's number is smaller than its child's, so when a node comes up, the path
    to its parent and the refusals of its earlier siblings have been decided.
    """
    q = draft.proposal.q
    assert q is not None
    slot, known = _slot(draft)
    slot = jnp.where(known, slot, q.shape[2])

    def arrive(node: jax.Array) -> _Trial:
        inside = prob(_pick(_at(processed, node), draft.proposal), _at_node(cuts, node))
        return _Trial(node, inside, _outside(inside, processed), _at(q, node))

    def attempt(trial: _Trial, i: jax.Array, here: jax.Array) -> tuple[_Trial, jax.Array]:
        passed, refused = _refuse(trial, slot[:, i], luck[:, i], draft.proposal.replacement)
        trial = _select(here, _select(passed, arrive(jnp.full_like(trial.node, i)), refused), trial)
        return trial, here & passed

    def visit(trial: _Trial, i: jax.Array) -> tuple[_Trial, jax.Array]:
        here = draft.valid[:, i] & (draft.parent[:, i] == trial.node)
        return jax.lax.cond(jnp.any(here), attempt, lambda trial, i, here: (trial, here), trial, i, here)

    root = jnp.zeros(slot.shape[0], jnp.int32)
    numbers = jnp.arange(1, slot.shape[1], dtype=jnp.int32)
    trial, passed = jax.lax.scan(visit, arrive(root), numbers)
    return jnp.concatenate([jnp.zeros_like(draft.valid[:, :1]), passed.T], axis=1), trial.left


def _select(condition: jax.Array, yes: _Trial, no: _Trial) -> _Trial:
    """Rows of ``yes`` where ``condition`` [B], of ``no`` elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def _outside(inside: jax.Array, processed: jax.Array) -> jax.Array:
    """Mass [B, ...] of p outside the draft's vocabulary, given p ``inside`` [B, ..., Vd] it."""
    mass_outside = 1.0 - mass(inside)
    return jnp.maximum(mass_outside, 0.0) if inside.shape[-1] < processed.shape[-1] else 0.0 * mass_outside


def _block(processed: jax.Array, draft: Draft, cuts: Cut, luck: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joint verification of a chain: nodes that passed [B, N], and the factor [B] on p in the residual.

    ``joint[i]`` is p_i of the paper, the capped likelihood ratio of the first i drafts; the longest prefix
    whose own test passes is kept.
    """
    p, q = _child_p(processed, draft, cuts), _child_q(draft)
    proposal = draft.proposal
    assert proposal.q is not None
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)

    def extend(joint: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        joint = jnp.minimum(joint * r, 1.0)
        return joint, joint

    first = jnp.ones_like(ratio[:, 0])
    _, joint = jax.lax.scan(extend, first, ratio[:, 1:].T)
    joint = jnp.concatenate([first[:, None], joint.T], axis=1)
    inside = prob(_pick(processed, proposal), jax.tree.map(lambda x: x[..., None], cuts))
    surplus = mass(jnp.maximum(joint[..., None] * inside - proposal.q, 0.0))
    surplus = surplus + joint * _outside(inside, processed)
    whole = surplus + 1.0 - joint
    # 0/0: the prefix is certain (joint 1) and p == q after it, so whatever the next draft is it may stay.
    chance = jnp.where(whole > 0, surplus / jnp.where(whole > 0, whole, 1.0), 1.0)
    number = jnp.arange(ratio.shape[1])
    more = jnp.roll(draft.valid, -1, axis=1) & (number < ratio.shape[1] - 1)
    good = draft.valid & (number > 0) & (luck < jnp.where(more, chance, joint))
    kept = jnp.max(jnp.where(good, number, 0), axis=1)
    return number <= kept[:, None], _at(joint, kept)
