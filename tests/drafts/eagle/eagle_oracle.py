"""The official EAGLE-2/3 round in plain NumPy (f64), one row at a time, written from its description alone.

Nothing of the package is used: growing key/value lists instead of a cache, boolean masks as lists of rows,
the official parent table, searchsorted over the chosen pool indices, leaf paths padded to a rectangle, and a
walk that compares whole paths.
"""

from __future__ import annotations

import numpy as np


def rms_norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Draft:
    """One row's draft. ``weights``: nested dict of f64 arrays; ``c``: anything with the configuration's
    fields."""

    def __init__(self, weights, c, ids=None):
        self.w, self.c = weights, c
        self.ids = np.arange(c.draft_vocab_size) if ids is None else np.asarray(ids)
        self.stable = [([], []) for _ in weights["layers"]]  # keys and values of true features
        self.seen = 0
        self.last = None

    def fuse(self, features):
        """[n, A, Ht] -> [n, H]"""
        if self.c.version == 1:
            return features[:, 0]
        if self.c.aux_norm == "each":
            parts = [
                rms_norm(features[:, i], self.w["aux_norm"][i], self.c.norm_eps)
                for i in range(features.shape[1])
            ]
            features = np.stack(parts, 1)
        joined = features.reshape(len(features), -1)
        if self.c.aux_norm == "joined":
            joined = rms_norm(joined, self.w["aux_norm"], self.c.norm_eps)
        return joined @ self.w["fc"] + self.w.get("fc_bias", 0)

    def run(self, feature, tokens, positions, past, mask):
        """n pairs -> (states [n, H], past with them appended); ``mask`` [n, len(past) + n] of bool."""
        c, e = self.c, self.w["embed"][tokens]
        if c.version == 1:
            x = np.concatenate([e, feature], -1) @ self.w["fc"] + self.w.get("fc_bias", 0)
        else:
            x = feature
        grown = []
        for i, (layer, (ks, vs)) in enumerate(zip(self.w["layers"], past, strict=True)):
            residual = x
            if i > 0:
                y = rms_norm(x, layer["input_norm"], c.norm_eps)
            elif c.version == 1:
                y = x
            else:
                h = rms_norm(x, layer["hidden_norm"], c.norm_eps)
                y = np.concatenate([rms_norm(e, layer["input_norm"], c.norm_eps), h], -1)
                residual = h if c.norm_before_residual else x
            q, k, v = (
                (y @ layer[n] + layer.get(f"{n}_bias", 0)).reshape(len(y), -1, c.head_dim)
                for n in ("q", "k", "v")
            )
            if c.qk_norm:
                q, k = rms_norm(q, layer["q_norm"], c.norm_eps), rms_norm(k, layer["k_norm"], c.norm_eps)
            q, k = rope(q, positions, c.rope.theta), rope(k, positions, c.rope.theta)
            ks, vs = [*ks, *k], [*vs, *v]
            group = c.num_heads // c.num_kv_heads
            keys, values = np.repeat(np.stack(ks), group, 1), np.repeat(np.stack(vs), group, 1)
            scores = np.einsum("nhd,shd->hns", q, keys) / np.sqrt(c.head_dim)
            weights = softmax(np.where(mask[None], scores, -np.inf))
            mixed = np.einsum("hns,shd->nhd", weights, values).reshape(len(y), -1)
            x = residual + mixed @ layer["o"] + layer.get("o_bias", 0)
            y = rms_norm(x, layer["mlp_norm"], c.norm_eps)
            gate = y @ layer["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
            grown.append((ks, vs))
        return (rms_norm(x, self.w["norm"], c.norm_eps) if c.feed_normed else x), grown

    def log_probs(self, state):
        if self.c.head_norm and not self.c.feed_normed:
            state = rms_norm(state, self.w["norm"], self.c.norm_eps)
        return log_softmax(state @ self.w["head"])

    def refill(self, features, following):
        """Pairs of the newly committed tokens, recomputed with the target's true features."""
        n, before = len(following), self.seen
        mask = np.concatenate([np.ones((n, before), bool), np.tril(np.ones((n, n), bool))], 1)
        out, self.stable = self.run(
            self.fuse(features), np.asarray(following), np.arange(before, before + n), self.stable, mask
        )
        self.seen, self.last = before + n, out[-1]

    def grow(self, root, top_k, depth, total):
        """(tokens, parent, depth, visible, scores) of the tree with ``total`` nodes, root included."""
        k, n = top_k, self.seen
        logp = self.log_probs(self.last)
        order = np.argsort(-logp, kind="stable")[:k]
        scores, ids = logp[order], self.ids[order]
        score_list, token_list, parent_list = [scores], [ids], [np.zeros(1, int)]
        hidden, mask, past, picked = (
            np.repeat(self.last[None], k, 0),
            np.eye(k, dtype=bool),
            self.stable,
            np.arange(k),
        )
        for i in range(depth - 1):
            bias = 1 + k * k * max(0, i - 1) + (k if i > 0 else 0)
            parent_list.append(picked + bias)
            full = np.concatenate([np.ones((k, n), bool), mask], 1)
            out, past = self.run(hidden, ids, np.full(k, n + i), past, full)
            logp = self.log_probs(out)
            order = np.argsort(-logp, axis=1, kind="stable")[:, :k]
            cumulative = np.take_along_axis(logp, order, 1) + scores[:, None]
            picked = np.argsort(-cumulative.ravel(), kind="stable")[:k]
            rows = picked // k
            hidden, scores = out[rows], cumulative.ravel()[picked]
            ids = self.ids[order.ravel()[picked]]
            score_list.append(cumulative.ravel())
            token_list.append(self.ids[order.ravel()])
            mask = np.concatenate([mask[rows], np.eye(k, dtype=bool)], 1)
        all_scores, all_tokens = np.concatenate(score_list), np.concatenate(token_list)
        parents = np.concatenate(parent_list)
        chosen = np.sort(np.argsort(-all_scores, kind="stable")[: total - 1])
        above = parents[chosen // k]
        index = np.searchsorted(chosen, above - 1)
        parent = np.concatenate([[0], np.where(above == 0, 0, index + 1)])
        visible = np.eye(total, dtype=bool)
        for j in range(1, total):
            visible[j] |= visible[parent[j]]
        return (
            np.concatenate([[root], all_tokens[chosen]]),
            parent,
            visible.sum(1) - 1,
            visible,
            np.concatenate([[0.0], all_scores[chosen]]),
        )


def leaf_paths(parent):
    """One row a leaf, root to leaf, padded with -1."""
    leaves = [i for i in range(len(parent)) if i not in parent[1:]] or [0]
    rows = []
    for node in leaves:
        path = [node]
        while path[0] != 0:
            path.insert(0, int(parent[path[0]]))
        rows.append(path)
    width = max(map(len, rows))
    return np.array([r + [-1] * (width - len(r)) for r in rows])


def walk(tokens, parent, best):
    """The longest leaf path whose tokens are what the target says (first among equals): node indices."""
    rows = leaf_paths(parent)
    kept = []
    for row in rows:
        path = [0]
        for node in row[1:]:
            if node < 0 or tokens[node] != best[path[-1]]:
                break
            path.append(int(node))
        kept.append(path)
    return max(kept, key=len)
