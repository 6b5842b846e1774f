"""Random tree-attention problems and their answer by explicit loops in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tree_attention import pack_ancestors, tree_attention


@dataclasses.dataclass
class TreeCase:
    """Arguments of `tree_attention`, and what the loops need beside them."""

    args: tuple
    options: dict
    parents: np.ndarray
    keys: np.ndarray  # [B, Hkv, S, D] float64, dequantised, nan where unwritten
    values: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray(self.args[4])


def random_parents(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    return np.array([[-1] + [rng.integers(0, i) for i in range(1, nodes)] for _ in range(batch)]).reshape(
        batch, nodes
    )


def ancestor_matrix(parents: np.ndarray) -> np.ndarray:
    batch, nodes = parents.shape
    matrix = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for i in range(nodes):
            node = i
            while node >= 0:
                matrix[b, i, node] = True
                node = parents[b, node]
    return matrix


def _quantise(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    stored = rng.integers(-127, 128, x.shape).astype(np.int8)
    return stored, rng.uniform(0.5, 1.5, x.shape[:-1]).astype(np.float32) / 64


def make_case(
    *,
    lengths: list[int],
    nodes: int = 10,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    slots: int = 300,
    dtype=jnp.float32,
    cache_dtype=None,
    page: int | None = None,
    seed: int = 0,
    **options,
) -> TreeCase:
    """A case whose unwritten slots are nan (int8: nan scales) and whose unused pages are too."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    cache_dtype = jnp.dtype(dtype if cache_dtype is None else cache_dtype)
    parents = random_parents(rng, batch, nodes)
    q = jnp.asarray(rng.normal(size=(batch, nodes, kv_heads * group, dim)), dtype)
    cache, dense = {}, {}
    for name in ("k", "v"):
        x = rng.normal(size=(batch, kv_heads, slots, dim))
        scale = None
        if cache_dtype == jnp.int8:
            stored, scale = _quantise(x, rng)
            for b, length in enumerate(lengths):
                scale[b, :, length + nodes :] = np.nan
            exact = stored.astype(np.float64) * scale[..., None]
        else:
            for b, length in enumerate(lengths):
                x[b, :, length + nodes :] = np.nan
            stored = np.asarray(jnp.asarray(x, cache_dtype))
            exact = stored.astype(np.float64)
        dense[name] = exact
        cache[name], cache[f"{name}_scale"] = stored, scale

    if page is not None:
        blocks = slots // page
        order = rng.permutation(batch * blocks)
        tables = np.full((batch, blocks), 10**6, np.int32)
        for b, length in enumerate(lengths):
            used = -(-(length + nodes) // page)
            tables[b, :used] = order[b * blocks : b * blocks + used]
        for name, x in cache.items():
            if x is not None:
                pages = np.moveaxis(x.reshape(*x.shape[:2], blocks, page, *x.shape[3:]), 2, 1)
                pages = pages.reshape(-1, *pages.shape[2:])
                scattered = np.empty_like(pages)
                scattered[order] = pages
                cache[name] = scattered
        options["block_tables"] = jnp.asarray(tables)
    if cache_dtype == jnp.int8:
        options |= {f"{name}_scale": jnp.asarray(cache[f"{name}_scale"]) for name in ("k", "v")}
    words = pack_ancestors(jnp.asarray(ancestor_matrix(parents)))
    args = (q, jnp.asarray(cache["k"]), jnp.asarray(cache["v"]), words, jnp.asarray(lengths, jnp.int32))
    return TreeCase(args, options, parents, dense["k"], dense["v"])


def naive(case: TreeCase) -> tuple[np.ndarray, np.ndarray]:
    """Attention by loops: float64 out [B, N, Hq, D] and log-sum-exp [B, N, Hq]."""
    q = np.asarray(case.args[0].astype(jnp.float32), np.float64)
    batch, nodes, heads, dim = q.shape
    group = heads // case.keys.shape[1]
    window, softcap = case.options.get("window"), case.options.get("softcap")
    depth = ancestor_matrix(case.parents).sum(-1) - 1
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    for b in range(batch):
        length = int(case.lengths[b])
        for i in range(nodes):
            seen, node = list(range(length)), i
            position = [*range(length), *(length + depth[b])]
            while node >= 0:
                seen.append(length + node)
                node = case.parents[b, node]
            if window is not None:
                seen = [s for s in seen if position[s] > position[length + i] - window]
            for h in range(heads):
                scores = case.keys[b, h // group, seen] @ q[b, i, h] * dim**-0.5
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights @ case.values[b, h // group, seen] / weights.sum()
                lse[b, i, h] = np.log(weights.sum()) + scores.max()
    return out, lse


def close(got: jax.Array, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(got.astype(jnp.float32)), want, rtol=tolerance, atol=tolerance)


CASES = {
    "plain": {"lengths": [0, 131, 255]},
    "window": {"lengths": [3, 200, 130], "window": 20, "block_kv": 128},
    "softcap": {"lengths": [140, 2], "softcap": 2.0},
    "int8": {"lengths": [250, 60], "cache_dtype": jnp.int8},
    "paged": {"lengths": [90, 0], "page": 32, "slots": 160},
    "paged window int8": {
        "lengths": [40, 101],
        "page": 16,
        "slots": 128,
        "cache_dtype": jnp.int8,
        "window": 9,
    },
    "two words": {"lengths": [120, 127], "nodes": 40, "group": 1},
    "chain of one": {"lengths": [127, 128, 129], "nodes": 1},
}


def run(case, **options):
    arrays, statics = split(case.options | options)
    return jax.jit(functools.partial(tree_attention, **statics))(*case.args, **arrays)


def split(options):
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    return arrays, {k: v for k, v in options.items() if k not in arrays}
