"""The EAGLE proposer: drafts a tree with a small network that reads the target's features.

Draft position p holds the pair (feature of token p, token p + 1); its state predicts token p + 2. When the
root sits at position n, pairs 0 .. n-1 are in the draft's cache, computed from the target's true features:
``observe`` recomputes what a round accepted instead of keeping what the tree guessed. The state of pair n-1
gives the tree's first level (the root's children); a node at depth d is expanded as the pair (its parent's
state, its token) at position n + d - 1. Keys and values of a tree are written behind the cache's length and
never committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree, sampling
from eaglejax.drafts import grow as eagle_tree
from eaglejax.drafts.base import Draft, Needs, Observation, Proposal, Proposer
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.static import static_draft
from eaglejax.drafts.tree import DynamicTree, StaticTree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, uncalibrated_format
from eaglejax.nn.cache import Cache
from eaglejax.nn.visible import Causal, Tree
from eaglejax.sampling import RowSampling
from eaglejax.tap import scope


@pytree.dataclass
class EagleState:
    """``cache``: keys and values of the observed pairs; ``feature`` [B, H]: the state of each row's last
    pair."""

    cache: Cache
    feature: jax.Array


@dataclasses.dataclass(frozen=True)
class Eagle(Proposer[EagleParams, EagleState]):
    """EAGLE-1, EAGLE-2 or EAGLE-3, as ``config`` says, on a tree.

    ``tree``: a ``DynamicTree`` (EAGLE-2), or a ``StaticTree`` (EAGLE-1's choices, a chain). ``sample`` False:
    children are the draft's most likely tokens, a function of the text so far (one-hot q). ``sample`` True,
    for static trees: children are drawn without replacement from q, the draft's distribution under the row's
    own temperature and filters; ``temperature`` replaces the row's where given (greedy rows take the most
    likely tokens). ``min_confidence``: nodes whose ``cut_score`` is below it are not proposed, and levels
    without any other node cost nothing. The score of a node is its cumulative draft probability, or its
    parent's where ``sample`` is True (see ``speculate.widths``). ``cache_dtype``: format of the draft's
    keys and values, by name (see ``KVFormat``; None: the dtype of its weights), whatever the target's is.
    """

    config: EagleConfig
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
        if not config.taps:
            raise ConfigError("the draft's boundaries are not known yet; use config.fit(target) or name them")

    @property
    def nodes(self) -> int:
        """N, root included."""
        return self.tree.nodes

    @property
    def depth(self) -> int:
        """D: most drafts that a round can accept."""
        return self.tree.reach if isinstance(self.tree, DynamicTree) else self.tree.depth

    @property
    def chain(self) -> bool:
        """Whether node i always sits at depth i."""
        return self.tree.is_chain

    @property
    def draws(self) -> bool:
        """Where ``sample`` is set."""
        return self.sample

    @property
    def needs(self) -> Needs:
        """The boundaries that the draft was made for."""
        return Needs(self.config.taps)

    @property
    def scratch(self) -> int:
        """Cache slots that a round's tree takes."""
        if isinstance(self.tree, DynamicTree):
            return (self.depth - 1) * self.tree.branching
        return sum(len(level) for level in _expanded(self.tree)[1:])

    def init(self, params: EagleParams, *, batch: int, capacity: int, inputs: Any = ()) -> EagleState:
        """An empty state for rows of up to ``capacity`` tokens."""
        del inputs
        dtype = eagle_model.dtype_of(params.weights)
        return EagleState(
            cache=eagle_model.init_cache(
                self.config, batch, capacity + self.scratch, self.cache_dtype or dtype
            ),
            feature=jnp.zeros((batch, self.config.hidden_size), dtype),
        )

    def observe(self, params: EagleParams, state: EagleState, seen: Observation) -> EagleState:
        """Append the pairs (true feature of a committed token, the token after it)."""
        assert seen.features is not None
        m = seen.tokens.shape[1]
        steps = jnp.arange(m, dtype=jnp.int32)
        real = steps < seen.count[:, None]
        feature = eagle_model.fuse(params, self.config, seen.features)
        # Padding stands behind the length and is masked, but a NaN there would survive a product with zero.
        feature = jnp.where(real[:, :, None], feature, 0)
        positions = state.cache.lengths[:, None] + steps
        out, cache = eagle_model.step(
            params, self.config, feature, seen.following, positions, state.cache, Causal(), positions
        )
        last = jnp.maximum(seen.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(out, last, axis=1)[:, 0]
        return EagleState(
            cache=cache.advance(seen.count),
            feature=jnp.where(seen.count[:, None] > 0, newest, state.feature),
        )

    def propose(
        self,
        params: EagleParams,
        state: EagleState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, EagleState]:
        """A tree below ``root`` [B]; the state's committed part does not change."""
        del lengths  # the draft's own cache counts the same tokens
        if isinstance(self.tree, DynamicTree):
            draft, cache = self._dynamic(params, state, root)
        else:
            draft, cache = self._static(params, state, root, rows, keys)
        return draft, dataclasses.replace(state, cache=cache)

    def _target_ids(self, params: EagleParams, tokens: jax.Array) -> jax.Array:
        return tokens if params.ids is None else jnp.take(params.ids, tokens)

    def _dynamic(self, params: EagleParams, state: EagleState, root: jax.Array) -> tuple[Draft, Cache]:
        tree, config = self.tree, self.config
        assert isinstance(tree, DynamicTree)
        k, batch = tree.branching, root.shape[0]
        grower = _Grower(self, params, state)
        with scope("step/0"):
            logits = eagle_model.logits(params, config, state.feature[:, None])
        scores, tokens = eagle_tree.expand(logits, jnp.zeros((batch, 1)), k)
        scores, tokens = scores[:, 0], self._target_ids(params, tokens[:, 0])
        feature = jnp.repeat(state.feature[:, None], k, axis=1)
        pool = [(scores, tokens, jnp.zeros((batch, k), jnp.int32))]
        seen = jnp.zeros((batch, k, 0), bool)
        # Where the level that is about to be expanded sits in the pool, counted from 1 (0 is the root).
        places = jnp.broadcast_to(jnp.arange(1, k + 1, dtype=jnp.int32), (batch, k))
        first = 1 + k
        for _ in range(1, self.depth):
            seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=2)
            out, logits = grower.run(feature, tokens, seen, scores)
            child_scores, child_tokens = eagle_tree.expand(logits, scores, k)
            child_tokens = self._target_ids(params, child_tokens)
            flat = (batch, k * k)
            parents = jnp.repeat(places, k, axis=1)
            pool.append((child_scores.reshape(flat), child_tokens.reshape(flat), parents))
            kept = eagle_tree.best(pool[-1][0], k)
            scores, tokens = (jnp.take_along_axis(x, kept, axis=1) for x in pool[-1][:2])
            above = kept // k
            feature = jnp.take_along_axis(out, above[:, :, None], axis=1)
            seen = jnp.take_along_axis(seen, above[:, :, None], axis=1)
            places, first = first + kept, first + k * k
        all_scores, all_tokens, all_parents = (jnp.concatenate(x, axis=1) for x in zip(*pool, strict=True))
        chosen, parent = eagle_tree.rerank(all_scores, all_parents, tree.nodes)
        levels = jnp.asarray(eagle_tree.pool_depths(tree, self.depth))
        score = jnp.take_along_axis(all_scores, chosen, axis=1)
        cut_score = jnp.exp(score)

        def with_root(x: jax.Array, at_root: Any) -> jax.Array:
            column = jnp.broadcast_to(jnp.asarray(at_root, x.dtype), (batch,))[:, None]
            return jnp.concatenate([column, x], axis=1)

        draft = Draft(
            tokens=with_root(jnp.take_along_axis(all_tokens, chosen, axis=1), root),
            parent=with_root(parent, 0),
            depth=with_root(levels[chosen], 0),
            valid=with_root((score > -jnp.inf) & (cut_score >= self.min_confidence), True),
            proposal=Proposal(),
            cut_score=with_root(cut_score, 1.0),
            max_depth=self.depth,
            chain=tree.is_chain,
        )
        return draft, grower.cache

    def _static(
        self, params: EagleParams, state: EagleState, root: jax.Array, rows: RowSampling, keys: jax.Array
    ) -> tuple[Draft, Cache]:
        tree, config = self.tree, self.config
        assert isinstance(tree, StaticTree)
        batch, n = root.shape[0], tree.nodes
        if self.temperature is not None:
            rows = dataclasses.replace(
                rows, temperature=jnp.where(rows.temperature > 0, self.temperature, 0.0)
            )
        sampled = self.sample and rows.sampled
        grower = _Grower(self, params, state)
        tokens = [root] * n
        scores = [jnp.zeros((batch,))] * n
        cut_scores = [jnp.ones((batch,))] * n
        valid = [jnp.ones((batch,), bool)] * n
        features: dict[int, jax.Array] = {}
        q_of: dict[int, jax.Array] = {}
        slots: list[int] = []
        for level, parents in enumerate(_expanded(tree)):
            if level == 0:
                out = state.feature[:, None]
                with scope("step/0"):
                    logits = eagle_model.logits(params, config, out)
            else:
                slots += parents
                seen = jnp.asarray(_sees(tree, parents, slots))
                out, logits = grower.run(
                    jnp.stack([features[p] for p in parents], axis=1),
                    jnp.stack([tokens[p] for p in parents], axis=1),
                    jnp.broadcast_to(seen, (batch, *seen.shape)),
                    jnp.stack([jnp.where(valid[p], scores[p], -jnp.inf) for p in parents], axis=1),
                )
            clean, normaliser = eagle_tree.with_normaliser(logits)
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
                logp = eagle_tree.log_prob(picked, normaliser[:, i : i + 1])
                for j, c in enumerate(children[p]):
                    tokens[c] = self._target_ids(params, picks[:, j])
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
        draft = static_draft(
            tree,
            jnp.stack(tokens, axis=1).astype(jnp.int32),
            jnp.stack(valid, axis=1),
            proposal,
            jnp.stack(cut_scores, axis=1),
        )
        return draft, grower.cache


class _Grower:
    """Runs the levels of one tree; trace-time bookkeeping of the scratch slots behind the committed pairs."""

    def __init__(self, proposer: Eagle, params: EagleParams, state: EagleState) -> None:
        self._proposer, self._params = proposer, params
        self._start = state.cache.lengths
        self._slots: list[jax.Array] = []
        self._level = 0
        self.cache = state.cache

    def run(
        self, feature: jax.Array, tokens: jax.Array, seen: jax.Array, scores: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """States [B, n, H] and logits [B, n, Vd] of one more level.

        ``feature`` [B, n, H]: the parents' states; ``tokens`` [B, n] target ids; ``seen`` [B, n, M]: which of
        the M scratch slots so far, the level's own included, each node sees; ``scores`` [B, n]: cumulative
        log-probabilities.
        """
        config, threshold = self._proposer.config, self._proposer.min_confidence
        positions = jnp.broadcast_to((self._start + self._level)[:, None], tokens.shape)
        self._level += 1
        self._slots.append(positions)
        slot_positions = jnp.concatenate(self._slots, axis=1)
        feature = self._params.adapter.from_draft(feature)

        def forward(cache: Cache) -> tuple[jax.Array, jax.Array, Cache]:
            out, cache = eagle_model.step(
                self._params, config, feature, tokens, positions, cache, Tree(seen), slot_positions
            )
            return out, eagle_model.logits(self._params, config, out), cache

        def skip(cache: Cache) -> tuple[jax.Array, jax.Array, Cache]:
            shape = (*tokens.shape, config.draft_vocab_size)
            return feature, jnp.full(shape, jnp.nan, jnp.float32), cache

        if threshold > 0:
            # As the nodes themselves are judged: a level that one row skips must hold nothing it would keep.
            alive = jnp.any(jnp.exp(scores) >= threshold)
            out, logits, self.cache = jax.lax.cond(alive, forward, skip, self.cache)
        else:
            with scope(f"step/{self._level}"):
                out, logits, self.cache = forward(self.cache)
        return out, logits


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
