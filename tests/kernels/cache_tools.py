"""Inputs of the kernels over a cache, and what they are to compute."""

import jax.numpy as jnp
import numpy as np

B, N, M, HQ, HKV, D, S = 3, 5, 7, 6, 2, 32, 40
LENGTHS = np.array([0, 19, S - M], np.int32)
SCALE = 0.3


def wide(x):
    return np.asarray(x, np.float64)


def oracle(q, k, v, lengths, visible, positions, places, *, window=None, softcap=None):
    """Attention from its definition, a query at a time, in float64."""
    out = np.zeros(q.shape)
    for b, n, h in np.ndindex(q.shape[:3]):
        scores, values = [], []
        for s in range(lengths[b] + visible.shape[2]):
            new = s - lengths[b]
            at = s if new < 0 else places[b, new]
            if (new >= 0 and not visible[b, n, new]) or (window and positions[b, n] - at >= window):
                continue
            score = SCALE * (q[b, n, h] @ k[b, h // (HQ // HKV), s])
            scores.append(softcap * np.tanh(score / softcap) if softcap else score)
            values.append(v[b, h // (HQ // HKV), s])
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            out[b, n, h] = (weights / weights.sum()) @ np.array(values)
    return out


def inputs(dim=D, dtype=jnp.float32, seed=0):
    """Queries that see some of M new slots, of which the last N are their own."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(B, N, HQ, dim)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(B, HKV, S, dim)), dtype) for _ in range(2))
    visible = rng.random((B, N, M)) < 0.5
    visible[:, np.arange(N), M - N + np.arange(N)] = True
    places = (LENGTHS[:, None] + rng.integers(0, 4, (B, M))).astype(np.int32)
    return (
        q,
        k,
        v,
        jnp.asarray(LENGTHS),
        jnp.asarray(visible),
        jnp.asarray(places[:, M - N :]),
        jnp.asarray(places),
    )
