"""``attend`` against a loop over queries and slots written from its definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.nn.attention import attend, attend_with_lse
from eaglejax.nn.attention_xla import visibility
from eaglejax.nn.visible import Causal, Full, Seen, Selected, Tree
from kernels_pallas.tree_attention import merge

B, N, M, HQ, HKV, D, S = 3, 4, 6, 4, 2, 8, 24
SCALE = 0.3


def oracle(q, k, v, lengths, visible, positions, slot_positions, window, softcap):
    out = np.zeros(q.shape)
    for b, n, h in np.ndindex(B, N, HQ):
        scores, values = [], []
        for s in range(lengths[b] + visible.shape[2]):
            new = s - lengths[b]
            at = s if new < 0 else slot_positions[b, new]
            if (new >= 0 and not visible[b, n, new]) or (window and positions[b, n] - at >= window):
                continue
            score = SCALE * float(q[b, n, h] @ k[b, h // (HQ // HKV), s])
            scores.append(softcap * np.tanh(score / softcap) if softcap else score)
            values.append(v[b, h // (HQ // HKV), s])
        weights = np.exp(np.array(scores) - max(scores))
        out[b, n, h] = (weights / weights.sum()) @ np.array(values)
    return out


def inputs(seed: int, slots: int):
    """Random tree-like visibility over ``slots`` new slots, of which the last N are the queries."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, N, HQ, D)).astype(np.float32)
    k, v = rng.standard_normal((2, B, HKV, S, D)).astype(np.float32)
    lengths = np.array([0, 7, S - slots], np.int32)
    visible = rng.random((B, N, slots)) < 0.5
    visible[:, np.arange(N), slots - N + np.arange(N)] = True
    slot_positions = (lengths[:, None] + rng.integers(0, 4, (B, slots))).astype(np.int32)
    return q, k, v, lengths, visible, slot_positions[:, slots - N :], slot_positions


@functools.partial(jax.jit, static_argnames=("window", "softcap"))
def run(q, k, v, lengths, visible, positions, slot_positions, window, softcap):
    with jax.default_matmul_precision("highest"):
        return attend(
            q,
            k,
            v,
            lengths,
            Seen(visible),
            positions,
            slot_positions=slot_positions,
            scale=SCALE,
            window=window,
            softcap=softcap,
        )


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 0.8), (5, 0.8)])
@pytest.mark.parametrize("slots", [N, M])
def test_equals_the_definition_with_poison_behind_the_written_slots(slots, window, softcap):
    q, k, v, lengths, visible, positions, slot_positions = inputs(0, slots)
    want = oracle(q, k, v, lengths, visible, positions, slot_positions, window, softcap)
    for b in range(B):
        k[b, :, lengths[b] + slots :] = np.nan
        v[b, :, lengths[b] + slots :] = np.nan
    given = None if slots == N else slot_positions
    got = run(q, k, v, lengths, visible, positions, given, window, softcap)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


def test_large_scores_stay_finite():
    q, k, v, lengths, visible, positions, _ = inputs(1, N)
    got = run(1e4 * q, 1e4 * k, v, lengths, visible, positions, None, None, None)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("cached", [0, 3, 11])
def test_a_window_of_w_shows_w_positions_self_included(cached):
    """Query at position i sees exactly min(i + 1, W) keys, wherever the cache ends and new tokens begin."""
    window, total = 5, 16
    n = total - cached
    lengths = jnp.array([cached])
    seen = visibility(lengths, Causal(), cached + jnp.arange(n)[None], jnp.arange(total)[None], window=window)
    for row, i in enumerate(range(cached, total)):
        want = [max(0, i - window + 1) <= s <= i for s in range(total)]
        assert seen[0, row].tolist() == want


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"implementation": "magic"}, "magic"),
        ({"visible": Seen(np.ones((B, N, M), bool))}, "slot_positions"),
        ({"q": np.ones((B, N, 3, D), np.float32)}, "3 query heads"),
        (
            {"visible": Seen(np.ones((B, N, S + 1), bool)), "slot_positions": np.ones((B, S + 1), np.int32)},
            "do not fit",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(change, match):
    q, k, v, lengths, visible, positions, _ = inputs(0, N)
    good = {
        "q": q,
        "k": k,
        "v": v,
        "lengths": lengths,
        "visible": Seen(visible),
        "positions": positions,
        "scale": SCALE,
    }
    with pytest.raises(ConfigError, match=match):
        attend(**{**good, **change})


KINDS = {
    "causal": Causal(),
    "documents": Causal(jnp.asarray([[0, 0, 1, 1], [0, 1, 2, 2], [3, 3, 3, 3]])),
    "full": Full(),
    "seen": Seen(inputs(0, M)[4]),
    "tree": Tree(jnp.tril(jnp.ones((1, N, N), bool))),
    "selected": Selected(jnp.asarray(np.random.default_rng(0).integers(-1, S, (B, N, 5))), N),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_over_slots_is_the_prefix_and_the_matrix_of_new_ones(name):
    kind, lengths = KINDS[name], np.array([0, 7, S - M])
    assert kind.refusal(B, N) is None
    m = kind.slots(N)
    new = np.asarray(kind.new(N, jnp.asarray(lengths)))
    over = np.asarray(kind.sees(N, jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.asarray(lengths)))
    assert new.shape == (B, N, m)
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(over[b, :, length : length + m], new[b])
        if name != "selected":
            assert over[b, :, :length].all()
            assert not over[b, :, length + m :].any()
    assert kind.refusal(B + 1, N) is not None or name in ("causal", "full", "tree")
    assert kind.refusal(B, N + 3) is not None or name in ("causal", "full")


def test_the_parts_of_a_cache_join_by_their_log_sum_exps():
    """Halves of the slots, as two devices hold them, and pages in any order, against the whole."""
    q, k, v, lengths, visible, positions, places = inputs(2, M)
    rest = (jnp.asarray(lengths), Seen(visible), positions)
    options = {"slot_positions": places, "scale": SCALE, "window": 5}
    attend_all = jax.jit(functools.partial(attend_with_lse, **options, implementation="xla"))
    with jax.default_matmul_precision("highest"):
        out, lse = attend_all(q, k, v, *rest)
        np.testing.assert_array_equal(out, jax.jit(functools.partial(attend, **options))(q, k, v, *rest))
        half = S // 2
        parts = [
            attend_all(q, x[0], x[1], *rest, slot_offset=start)
            for start, x in ((0, (k[:, :, :half], v[:, :, :half])), (half, (k[:, :, half:], v[:, :, half:])))
        ]
        joined, total = merge(*(jnp.stack(x) for x in zip(*parts, strict=True)))
        np.testing.assert_allclose(joined, out, rtol=0, atol=3e-6)
        np.testing.assert_allclose(total, lse, rtol=0, atol=3e-6)
        # A row whose every visible slot lies in one half gets nothing from the other.
        assert np.isneginf(parts[1][1][0]).all()
        block, order = 4, np.random.default_rng(0).permutation(B * S // 4)
        tables = order.reshape(B, -1).astype(np.int32)
        pages = [np.zeros((B * S // block, HKV, block, D), np.float32) for _ in range(2)]
        for page, x in zip(pages, (k, v), strict=True):
            page[tables] = x.reshape(B, HKV, -1, block, D).swapaxes(1, 2)
        paged, paged_lse = attend_all(q, *pages, *rest, block_tables=tables)
        np.testing.assert_allclose(paged, out, rtol=0, atol=3e-6)
        np.testing.assert_allclose(paged_lse, lse, rtol=0, atol=3e-6)


def test_selected_slots_are_attention_to_those_alone():
    q, k, v, lengths, visible, positions, places = inputs(3, M)
    seen = np.asarray(Seen(visible).sees(N, jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.asarray(lengths)))
    rng, chosen = np.random.default_rng(1), np.full((B, N, S + 2), -1, np.int32)
    for b, n in np.ndindex(B, N):
        slots = rng.permutation(np.flatnonzero(seen[b, n]))
        chosen[b, n, rng.permutation(S + 2)[: len(slots)]] = slots
    for x in (k, v):
        for b in range(B):
            x[b, :, lengths[b] + M :] = np.nan
    options = {"slot_positions": places, "scale": SCALE, "window": 5, "softcap": 0.8}
    run_all = jax.jit(functools.partial(attend_with_lse, **options))
    with jax.default_matmul_precision("highest"):
        want = run_all(q, k, v, lengths, Seen(visible), positions)
        got = run_all(q, k, v, lengths, Selected(jnp.asarray(chosen), M), positions)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
        fewer = run_all(q, k, v, lengths, Selected(jnp.asarray(chosen[:, :, : S // 2]), M), positions)
    assert not np.allclose(fewer[0], want[0])
