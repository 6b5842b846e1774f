"""Growing a greedy draft tree in torch, by the rules of ``drafts.eagle.proposer`` and ``drafts.grow``.

Scores are f32 cumulative log-probabilities and equal ones go to the lower index everywhere, so that two runs
with the same logits grow the same tree.
"""

from __future__ import annotations

import dataclasses

from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models import eagle
from eaglejax.interop.models.decoder import Cache
from eaglejax.interop.models.layers import linear, top_k
from eaglejax.interop.models.specs import EagleSpec, TreeSpec
from eaglejax.tap import scope


@dataclasses.dataclass
class Tree:
    """A tree of guesses a row; ``tokens``, ``parent``, ``depth`` [B, N] int32, ``valid`` [B, N] bool,
    ``scores`` [B, N] f32 (0 at the root). See ``drafts.base.Draft``."""

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    valid: torch.Tensor
    scores: torch.Tensor


def with_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cleaned logits [..., Vd], log-normaliser [...]): NaN and +inf become -inf."""
    clean = torch.where(logits < torch.inf, logits, -torch.inf)
    return clean, torch.logsumexp(clean, -1)


def log_prob(logit: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """Log-probability, at most 0; -inf where it is not a number."""
    logp = logit - normaliser
    return torch.where(logp.isnan(), -torch.inf, logp.clamp_max(0.0))


def expand(logits: torch.Tensor, scores: torch.Tensor, children: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``children`` best continuations of every node: (cumulative scores, draft ids), [B, n, children]."""
    clean, normaliser = with_normaliser(logits)
    top, tokens = top_k(clean, children)
    return scores.unsqueeze(-1) + log_prob(top, normaliser.unsqueeze(-1)), tokens


def ancestors(parent: torch.Tensor, valid: torch.Tensor, depth: int) -> torch.Tensor:
    """Ancestor-or-self matrix [B, N, N] bool; an invalid node sees itself alone and nobody sees it."""
    b, n = parent.shape
    eye = torch.eye(n, dtype=torch.bool, device=parent.device)
    reach = eye.expand(b, n, n)
    above = parent.long().unsqueeze(-1).expand(b, n, n)
    for _ in range(depth):
        reach = eye | reach.gather(1, above)
    both = valid.unsqueeze(2) & valid.unsqueeze(1)
    return torch.where(both, reach, eye)


class Grower:
    """Runs the levels of one tree over scratch slots behind the committed pairs.

    ``feature`` [B, H] is the state of each row's last pair, the root's.
    """

    def __init__(
        self,
        adapter: DeviceAdapter,
        spec: EagleSpec,
        draft: eagle.Draft,
        tree: TreeSpec,
        cache: Cache,
    ) -> None:
        self._adapter, self._spec, self._draft, self._tree = adapter, spec, draft, tree
        self._cache = cache
        self._slots: list[torch.Tensor] = []

    def grow(self, root: torch.Tensor, feature: torch.Tensor) -> Tree:
        """The tree below ``root`` [B] int32; the cache's committed part does not change."""
        return (self._dynamic if self._tree.kind == "dynamic" else self._static)(root, feature)

    def _first(self, feature: torch.Tensor) -> torch.Tensor:
        """Logits [B, 1, Vd] of the root's children."""
        with scope("step/0"):
            return eagle.logits(self._adapter, self._spec, self._draft, feature.unsqueeze(1))

    def _run(
        self, feature: torch.Tensor, tokens: torch.Tensor, seen: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, n, H] and logits [B, n, Vd] of one more level; see ``drafts.eagle.proposer``."""
        level = len(self._slots)
        positions = (self._cache.lengths + level).unsqueeze(1).expand(tokens.shape)
        self._slots.append(positions)
        if self._draft.draft_map is not None:
            feature = linear(self._adapter, feature, self._draft.draft_map)
        threshold = self._tree.min_confidence
        if threshold > 0 and not bool((torch.exp(scores) >= threshold).any()):
            vocabulary = self._spec.draft_vocab_size
            blank = torch.full((*tokens.shape, vocabulary), torch.nan, device=tokens.device)
            return feature, blank
        with scope(f"step/{level + 1}"):
            out = eagle.step(
                self._adapter,
                self._spec,
                self._draft,
                feature,
                tokens,
                positions,
                self._cache,
                seen,
                torch.cat(self._slots, 1),
            )
            return out, eagle.logits(self._adapter, self._spec, self._draft, out)

    def _target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        ids = self._draft.ids
        return (tokens if ids is None else ids[tokens]).to(torch.int32)

    def _dynamic(self, root: torch.Tensor, feature: torch.Tensor) -> Tree:
        tree, k, b = self._tree, self._tree.branching, root.shape[0]
        device = root.device
        scores, tokens = expand(self._first(feature), torch.zeros(b, 1, device=device), k)
        scores, tokens = scores[:, 0], self._target_ids(tokens[:, 0])
        state = feature.unsqueeze(1).repeat(1, k, 1)
        pool = [(scores, tokens, torch.zeros_like(tokens))]
        seen = torch.zeros(b, k, 0, dtype=torch.bool, device=device)
        # Where the level about to be expanded sits in the pool, counted from 1 (0 is the root).
        places = torch.arange(1, k + 1, dtype=torch.int32, device=device).expand(b, k)
        first = 1 + k
        own = torch.eye(k, dtype=torch.bool, device=device).expand(b, k, k)
        for _ in range(1, tree.levels):
            seen = torch.cat([seen, own], 2)
            out, logits = self._run(state, tokens, seen, scores)
            child_scores, child_tokens = expand(logits, scores, k)
            child_scores = child_scores.reshape(b, k * k)
            child_tokens = self._target_ids(child_tokens).reshape(b, k * k)
            pool.append((child_scores, child_tokens, places.repeat_interleave(k, 1)))
            scores, kept = top_k(child_scores, k)
            tokens = child_tokens.gather(1, kept)
            above = kept // k
            state = out.gather(1, above.unsqueeze(2).expand(-1, -1, out.shape[2]))
            seen = seen.gather(1, above.unsqueeze(2).expand(-1, -1, seen.shape[2]))
            places, first = (first + kept).to(torch.int32), first + k * k
        all_scores, all_tokens, all_parents = (torch.cat(x, 1) for x in zip(*pool, strict=True))
        chosen = top_k(all_scores, tree.nodes - 1)[1].sort(1).values
        above = all_parents.gather(1, chosen)
        parent = (chosen.unsqueeze(1) + 1 <= above.unsqueeze(2)).sum(2).to(torch.int32)
        sizes = torch.tensor([k] + [k * k] * (tree.levels - 1), device=device)
        levels = torch.arange(1, tree.levels + 1, dtype=torch.int32, device=device).repeat_interleave(sizes)
        score = all_scores.gather(1, chosen)
        valid = (score > -torch.inf) & (torch.exp(score) >= tree.min_confidence)
        zero = torch.zeros(b, 1, dtype=torch.int32, device=device)
        return Tree(
            tokens=torch.cat([root.unsqueeze(1), all_tokens.gather(1, chosen)], 1),
            parent=torch.cat([zero, parent], 1),
            depth=torch.cat([zero, levels[chosen]], 1),
            valid=torch.cat([zero == 0, valid], 1),
            scores=torch.cat([zero.float(), score], 1),
        )

    def _static(self, root: torch.Tensor, feature: torch.Tensor) -> Tree:
        tree, b, n = self._tree, root.shape[0], self._tree.nodes
        depths = [0] * n
        for i in range(1, n):
            depths[i] = depths[tree.parent[i]] + 1
        tokens = [root] * n
        scores = [torch.zeros(b, device=root.device)] * n
        valid = [torch.ones(b, dtype=torch.bool, device=root.device)] * n
        states: dict[int, torch.Tensor] = {}
        slots: list[int] = []
        inner = sorted(set(tree.parent[1:]))
        for level in range(max(depths)):
            parents = [i for i in inner if depths[i] == level]
            if level == 0:
                out, logits = feature.unsqueeze(1), self._first(feature)
            else:
                slots += parents
                seen = torch.tensor(_sees(tree, parents, slots), device=root.device)
                out, logits = self._run(
                    torch.stack([states[p] for p in parents], 1),
                    torch.stack([tokens[p] for p in parents], 1),
                    seen.expand(b, *seen.shape),
                    torch.stack([torch.where(valid[p], scores[p], -torch.inf) for p in parents], 1),
                )
            clean, normaliser = with_normaliser(logits)
            ordered, order = top_k(clean, max(tree.rank) + 1)
            for i, p in enumerate(parents):
                for c in (c for c in range(1, n) if tree.parent[c] == p):
                    rank = tree.rank[c]
                    logp = log_prob(ordered[:, i, rank], normaliser[:, i])
                    tokens[c] = self._target_ids(order[:, i, rank])
                    scores[c] = scores[p] + logp
                    certain = torch.exp(scores[c]) >= tree.min_confidence
                    valid[c] = valid[p] & certain & (logp > -torch.inf)
                    states[c] = out[:, i]
        shape = torch.tensor([tree.parent, depths], dtype=torch.int32, device=root.device)
        return Tree(
            tokens=torch.stack(tokens, 1),
            parent=shape[0].expand(b, n),
            depth=shape[1].expand(b, n),
            valid=torch.stack(valid, 1),
            scores=torch.stack(scores, 1),
        )


def _sees(tree: TreeSpec, nodes: list[int], slots: list[int]) -> list[list[bool]]:
    """Ancestor-or-self rows of ``nodes`` over ``slots``, the root left out (it is a committed pair)."""
    seen = [[False] * len(slots) for _ in nodes]
    for row, node in zip(seen, nodes, strict=True):
        while node:
            row[slots.index(node)] = True
            node = tree.parent[node]
    return seen
