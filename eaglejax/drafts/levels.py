"""Proposers that grow a tree with a network of their own, one level a forward.

What such a network is stands with its family, as a :class:`Levels`: where the tree begins, and the states and
logits of one more level. A level's keys and values are written behind what is committed and never committed.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import sampling
from eaglejax.drafts import grow
from eaglejax.drafts.base import Draft, ParamsT, Proposal, Proposer, StateT
from eaglejax.drafts.static import static_draft
from eaglejax.drafts.tree import DynamicTree, StaticTree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, uncalibrated_format
from eaglejax.sampling import RowSampling
from eaglejax.tap import scope


class Levels(abc.ABC):
    """One tree in growth over a family's network; trace-time bookkeeping of what its levels write.

    ``feature`` [B, H]: the state that the root's children are drafted from. ``memory``: whatever the levels
    are written to. ``level``: of the nodes that are expanded, 0 for the root.
    """

    def __init__(self, feature: jax.Array, memory: Any, vocab_size: int, min_confidence: float) -> None:
        self.feature, self.memory = feature, memory
        self._vocab_size, self._threshold = vocab_size, min_confidence
        self.level = 0

    @abc.abstractmethod
    def logits(self, state: jax.Array) -> jax.Array:
        """Logits [..., Vd] f32 of the present level's states [..., H]."""

    @abc.abstractmethod
    def place(self, tokens: jax.Array, seen: jax.Array) -> Any:
        """Where the present level's nodes stand: ``tokens`` [B, n]; ``seen`` [B, n, M], which of the M nodes
        expanded so far, the level's own included, each of them sees."""

    @abc.abstractmethod
    def forward(
        self, at: Any, feature: jax.Array, tokens: jax.Array, memory: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(states [B, n, H], logits [B, n, Vd], the memory with the level) of the pairs of ``feature``
        [B, n, H], the parents' states, and ``tokens``; ``at`` is from :meth:`place`."""

    def run(
        self, feature: jax.Array, tokens: jax.Array, seen: jax.Array, scores: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """States [B, n, H] and logits [B, n, Vd] of one more level.

        ``feature`` [B, n, H]: the parents' states; ``tokens`` [B, n] target ids; ``seen``: see ``place``;
        ``scores`` [B, n]: cumulative log-probabilities.
        """
        self.level += 1
        at = self.place(tokens, seen)

        def forward(memory: Any) -> tuple[jax.Array, jax.Array, Any]:
            return self.forward(at, feature, tokens, memory)

        def skip(memory: Any) -> tuple[jax.Array, jax.Array, Any]:
            shape = (*tokens.shape, self._vocab_size)
            return feature, jnp.full(shape, jnp.nan, jnp.float32), memory

        if self._threshold > 0:
            # As the nodes themselves are judged: a level that one row skips must hold nothing it would keep.
            alive = jnp.any(jnp.exp(scores) >= self._threshold)
            out, logits, self.memory = jax.lax.cond(alive, forward, skip, self.memory)
        else:
            with scope(f"step/{self.level}"):
                out, logits, self.memory = forward(self.memory)
        return out, logits


class OnePass(Levels):
    """Levels whose ``logits`` [B, K, V] one pass gave before any token was chosen: a level's distribution is
    the same below every node of it, and nodes have no state of their own."""

    def __init__(self, logits: jax.Array, memory: Any, min_confidence: float) -> None:
        nothing = jnp.zeros((logits.shape[0], 1), logits.dtype)
        super().__init__(nothing, memory, logits.shape[-1], min_confidence)
        self._logits = logits

    def logits(self, state: jax.Array) -> jax.Array:
        """Of the level."""
        here = self._logits[:, self.level, None]
        return jnp.broadcast_to(here, (*state.shape[:2], here.shape[-1]))

    def place(self, tokens: jax.Array, seen: jax.Array) -> None:
        """Nowhere."""
        del tokens, seen

    def forward(
        self, at: None, feature: jax.Array, tokens: jax.Array, memory: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """What the pass gave."""
        del at, tokens
        return feature, self.logits(feature), memory


@dataclasses.dataclass(frozen=True)
class Grown(Proposer[ParamsT, StateT]):
    """A tree by a network that scores levels.

    ``config``: the family's, which has a ``draft_vocab_size``. ``tree``: a ``DynamicTree`` (EAGLE-2), or a
    ``StaticTree`` (fixed choices, a chain). ``sample`` False:
    children are the draft's most likely tokens, a function of the text so far (one-hot q). ``sample`` True,
    for static trees: children are drawn without replacement from q, the draft's distribution under the row's
    own temperature and filters; ``temperature`` replaces the row's where given (greedy rows take the most
    likely tokens). ``min_confidence``: nodes whose ``cut_score`` is below it are not proposed, and levels
    without any other node cost nothing. The score of a node is its cumulative draft probability, or its
    parent's where ``sample`` is True (see ``speculate.widths``). ``cache_dtype``: format of the draft's
    keys and values, by name (see ``KVFormat``; None: the dtype of its weights), whatever the target's is.
    """

    config: Any
    tree: DynamicTree | StaticTree = dataclasses.field(default_factory=DynamicTree)
    sample: bool = False
    temperature: float | None = None
    min_confidence: float = 0.0
    cache_dtype: str | KVFormat | None = None

    def __post_init__(self) -> None:
        config, tree = self.config, self.tree
        if self.depth < 1:
            raise ConfigError("a tree of depth 0 drafts nothing; use plain autoregressive decoding")
        widest = tree.branching if isinstance(tree, DynamicTree) else max(tree.rank) + 1
        if widest > config.draft_vocab_size:
            raise ConfigError(
                f"the tree wants {widest} children; the draft knows {config.draft_vocab_size} tokens"
            )
        if self.sample and isinstance(tree, DynamicTree):
            raise ConfigError(
                "a dynamic tree is made of the most likely tokens; sampled drafts need a static tree"
            )
        if self.temperature is not None and not self.sample:
            raise ConfigError("a draft temperature has no effect without sample=True")
        if self.temperature is not None and not 0 < self.temperature < np.inf:
            raise ConfigError(f"draft temperature {self.temperature} must be a positive number")
        if not 0 <= self.min_confidence < 1:
            raise ConfigError(f"min_confidence {self.min_confidence} must lie in [0, 1)")
        if self.cache_dtype is not None:
            uncalibrated_format(self.cache_dtype)

    @property
    def nodes(self) -> int:
        """N, root included."""
        return self.tree.nodes

    @property
    def depth(self) -> int:
        """D: most drafts that a round can accept."""
        return self.tree.reach if isinstance(self.tree, DynamicTree) else self.tree.depth

    @property
    def draws(self) -> bool:
        """Where ``sample`` is set."""
        return self.sample

    @property
    def chain(self) -> bool:
        """Whether node i always sits at depth i."""
        return self.tree.is_chain

    @property
    def scratch(self) -> int:
        """Nodes of a tree that are expanded, the root left out: what its levels write."""
        if isinstance(self.tree, DynamicTree):
            return (self.depth - 1) * self.tree.branching
        return sum(len(level) for level in _expanded(self.tree)[1:])

    @abc.abstractmethod
    def levels(self, params: ParamsT, state: StateT) -> Levels:
        """The network at the root of a new tree."""

    @abc.abstractmethod
    def regrown(self, state: StateT, memory: Any) -> StateT:
        """``state`` with the memory that a tree was written to; what it has committed does not change."""

    def target_ids(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Target ids of draft ids."""
        return tokens if params.ids is None else jnp.take(params.ids, tokens)

    def propose(
        self,
        params: ParamsT,
        state: StateT,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, StateT]:
        """A tree below ``root`` [B]; the state's committed part does not change."""
        del lengths  # the draft's own memory counts the same tokens
        grower = self.levels(params, state)
        if isinstance(self.tree, DynamicTree):
            draft = self._dynamic(self.tree, grower, params, root)
        else:
            draft = self._static(self.tree, grower, params, root, rows, keys)
        return draft, self.regrown(state, grower.memory)

    def _dynamic(self, tree: DynamicTree, grower: Levels, params: Any, root: jax.Array) -> Draft:
        k, batch = tree.branching, root.shape[0]
        with scope("step/0"):
            logits = grower.logits(grower.feature[:, None])
        scores, tokens = grow.expand(logits, jnp.zeros((batch, 1)), k)
        scores, tokens = scores[:, 0], self.target_ids(params, tokens[:, 0])
        feature = jnp.repeat(grower.feature[:, None], k, axis=1)
        pool = [(scores, tokens, jnp.zeros((batch, k), jnp.int32))]
        seen = jnp.zeros((batch, k, 0), bool)
        # Where the level that is about to be expanded sits in the pool, counted from 1 (0 is the root).
        places = jnp.broadcast_to(jnp.arange(1, k + 1, dtype=jnp.int32), (batch, k))
        first = 1 + k
        for _ in range(1, self.depth):
            seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=2)
            out, logits = grower.run(feature, tokens, seen, scores)
            child_scores, child_tokens = grow.expand(logits, scores, k)
            child_tokens = self.target_ids(params, child_tokens)
            flat = (batch, k * k)
            parents = jnp.repeat(places, k, axis=1)
            pool.append((child_scores.reshape(flat), child_tokens.reshape(flat), parents))
            kept = grow.best(pool[-1][0], k)
            scores, tokens = (jnp.take_along_axis(x, kept, axis=1) for x in pool[-1][:2])
            above = kept // k
            feature = jnp.take_along_axis(out, above[:, :, None], axis=1)
            seen = jnp.take_along_axis(seen, above[:, :, None], axis=1)
            places, first = first + kept, first + k * k
        all_scores, all_tokens, all_parents = (jnp.concatenate(x, axis=1) for x in zip(*pool, strict=True))
        chosen, parent = grow.rerank(all_scores, all_parents, tree.nodes)
        levels = jnp.asarray(grow.pool_depths(tree, self.depth))
        score = jnp.take_along_axis(all_scores, chosen, axis=1)
        cut_score = jnp.exp(score)

        def with_root(x: jax.Array, at_root: Any) -> jax.Array:
            column = jnp.broadcast_to(jnp.asarray(at_root, x.dtype), (batch,))[:, None]
            return jnp.concatenate([column, x], axis=1)

        return Draft(
            tokens=with_root(jnp.take_along_axis(all_tokens, chosen, axis=1), root),
            parent=with_root(parent, 0),
            depth=with_root(levels[chosen], 0),
            valid=with_root((score > -jnp.inf) & (cut_score >= self.min_confidence), True),
            proposal=Proposal(),
            cut_score=with_root(cut_score, 1.0),
            max_depth=self.depth,
            chain=tree.is_chain,
        )

    def _static(
        self,
        tree: StaticTree,
        grower: Levels,
        params: Any,
        root: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> Draft:
        batch, n = root.shape[0], tree.nodes
        if self.temperature is not None:
            rows = dataclasses.replace(
                rows, temperature=jnp.where(rows.temperature > 0, self.temperature, 0.0)
            )
        sampled = self.sample and rows.sampled
        tokens = [root] * n
        scores = [jnp.zeros((batch,))] * n
        cut_scores = [jnp.ones((batch,))] * n
        valid = [jnp.ones((batch,), bool)] * n
        features: dict[int, jax.Array] = {}
        q_of: dict[int, jax.Array] = {}
        slots: list[int] = []
        for level, parents in enumerate(_expanded(tree)):
            if level == 0:
                out = grower.feature[:, None]
                with scope("step/0"):
                    logits = grower.logits(out)
            else:
                slots += parents
                seen = jnp.asarray(_sees(tree, parents, slots))
                out, logits = grower.run(
                    jnp.stack([features[p] for p in parents], axis=1),
                    jnp.stack([tokens[p] for p in parents], axis=1),
                    jnp.broadcast_to(seen, (batch, *seen.shape)),
                    jnp.stack([jnp.where(valid[p], scores[p], -jnp.inf) for p in parents], axis=1),
                )
            clean, normaliser = grow.with_normaliser(logits)
            children = {p: [c for c in range(1, n) if tree.parent[c] == p] for p in parents}
            ranks = {p: [tree.rank[c] for c in children[p]] for p in parents}
            top = jax.lax.top_k(clean, max(max(r) for r in ranks.values()) + 1)[1].astype(jnp.int32)
            q = sampling.distribution(clean, rows) if sampled else None
            for i, p in enumerate(parents):
                picks, exists = top[:, i, np.asarray(ranks[p])], jnp.ones((batch, len(ranks[p])), bool)
                if q is not None:
                    q_of[p] = q[:, i]
                    drawn, left = _draw_siblings(q[:, i], sampling.fold(keys, p), len(children[p]))
                    greedy = (rows.temperature <= 0)[:, None]
                    picks, exists = jnp.where(greedy, picks, drawn), greedy | left
                picked = jnp.take_along_axis(clean[:, i], picks, axis=1)
                logp = grow.log_prob(picked, normaliser[:, i : i + 1])
                for j, c in enumerate(children[p]):
                    tokens[c] = self.target_ids(params, picks[:, j])
                    scores[c] = scores[p] + logp[:, j]
                    cut_scores[c] = jnp.exp(scores[p] if self.sample else scores[c])
                    certain = cut_scores[c] >= self.min_confidence
                    valid[c] = valid[p] & exists[:, j] & certain & (logp[:, j] > -jnp.inf)
                    features[c] = out[:, i]
        proposal = Proposal()
        if sampled:
            leaf = jnp.zeros_like(q_of[0])
            q_all = jnp.stack([q_of.get(i, leaf) for i in range(n)], axis=1)
            proposal = Proposal(q=q_all, ids=params.ids, replacement=False)
        return static_draft(
            tree,
            jnp.stack(tokens, axis=1).astype(jnp.int32),
            jnp.stack(valid, axis=1),
            proposal,
            jnp.stack(cut_scores, axis=1),
        )


def _expanded(tree: StaticTree) -> list[list[int]]:
    """The nodes with children, level by level (level 0: the root)."""
    inner = sorted(set(tree.parent[1:]))
    depths = tree.depths
    return [[i for i in inner if depths[i] == d] for d in range(tree.depth)]


def _sees(tree: StaticTree, nodes: list[int], slots: list[int]) -> np.ndarray:
    """Ancestor-or-self matrix [len(nodes), len(slots)] bool, the root left out (it is a committed pair)."""
    seen = np.zeros((len(nodes), len(slots)), bool)
    for row, node in enumerate(nodes):
        while node:
            seen[row, slots.index(node)] = True
            node = tree.parent[node]
    return seen


def _draw_siblings(q: jax.Array, keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """``count`` draws from ``q`` [B, Vd] without replacement: (draft ids [B, count], whether any mass was
    left)."""
    tokens, exists = [], []
    for i in range(count):
        drawn = sampling.draw(q, sampling.fold(keys, i))
        exists.append(q.max(axis=-1) > 0)
        tokens.append(drawn)
        q = jnp.where(jnp.arange(q.shape[-1]) == drawn[:, None], 0.0, q)
    return jnp.stack(tokens, axis=1), jnp.stack(exists, axis=1)
