"""``attend`` against a loop over queries and slots written from its definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.nn.attention import attend
from eaglejax.nn.attention_xla import visibility
from eaglejax.nn.visible import Causal, Seen

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
