"""Attention over narrow caches: what they stand for, in every width, kernel and chunk, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import (
    tiny_config,
)

from eaglejax import devices
from eaglejax.devices import Attention
from eaglejax.errors import ConfigError
from eaglejax.kv_format import FORMATS, KVFormat
from eaglejax.models import decoder, memory
from eaglejax.nn import attention as attention_module
from eaglejax.nn import attention_implementations, kv_codec
from eaglejax.nn.attention import attend
from eaglejax.nn.cache import Cache, CacheScales, Placement
from eaglejax.nn.kv import KV, init_cache, write
from eaglejax.nn.visible import Causal, Tree

NARROW = [name for name in FORMATS if not KVFormat(name).plain]
SOME = ["int8", "int8-static", "turbo4"]
ALL = SOME + [pytest.param(name, marks=pytest.mark.slow) for name in NARROW if name not in SOME]
B, HQ, HKV, D, S = 2, 4, 2, 8, 32
LENGTHS = np.asarray([3, 12], np.int32)
NEW = 17
WIDTHS = (1, 2, 3, 4, 8, 9, 17)
OPTIONS = {"scale": 0.4, "window": 9, "softcap": 20.0}
KERNEL = Attention("tpu", interpret=True)


def filled(name: str, seed: int = 0, dim: int = D) -> tuple[Cache, dict[str, np.ndarray]]:
    """One layer with random rows of ``LENGTHS`` tokens, and q, k, v [B, 17, heads, d] of tokens to come."""
    rng = np.random.default_rng(seed)
    scales = None
    if KVFormat(name).static:
        channels = jnp.asarray(rng.uniform(0.015, 0.03, (HKV, dim)), jnp.float32)
        scales = CacheScales(k=(channels,), v=(1.5 * channels,))
    cache = init_cache(layers=1, batch=B, capacity=S, kv_heads=HKV, head_dim=dim, kv_form=name, scales=scales)
    old = rng.standard_normal((2, B, HKV, LENGTHS.max(), dim)).astype(np.float32)
    zeros = jnp.zeros(B, jnp.int32)
    layer = cache.layers[0].write(*map(jnp.asarray, old), zeros)
    cache = Cache((layer,), lengths=jnp.asarray(LENGTHS))
    new = {
        "q": rng.standard_normal((B, NEW, HQ, dim)).astype(np.float32),
        "k": rng.standard_normal((B, NEW, HKV, dim)).astype(np.float32),
        "v": rng.standard_normal((B, NEW, HKV, dim)).astype(np.float32),
    }
    return cache, new


@pytest.mark.parametrize("name", ALL)
def test_every_width_sees_what_decoding_one_by_one_sees(name: str) -> None:
    """A chain that is verified at once reads its own keys from the cache, as single tokens would: the same
    codes, and the same results."""

    @jax.jit
    def chains(cache: Cache, new: dict[str, jax.Array]) -> list[tuple[jax.Array, Any, Any]]:
        out = []
        for n in WIDTHS:

            def step(layer: KV, start: jax.Array, n: int = n) -> Any:
                lengths = cache.lengths + start
                part = [jax.lax.dynamic_slice_in_dim(new[x], start, n, axis=1) for x in "qkv"]
                positions = lengths[:, None] + jnp.arange(n)
                result, layer = layer.attend(*part, Placement(lengths, positions, Causal()), **OPTIONS)
                return layer, result

            starts = jnp.arange(0, NEW - NEW % n, n)
            layer, parts = jax.lax.scan(step, cache.layers[0], starts)
            out.append((parts.transpose(1, 0, 2, 3, 4).reshape(B, -1, HQ, D), layer.k, layer.v))
        return out

    sequential, *wider = chains(*filled(name))
    for n, (out, k, v) in zip(WIDTHS[1:], wider, strict=True):
        whole = NEW - NEW % n
        np.testing.assert_allclose(out, sequential[0][:, :whole], rtol=0, atol=3e-6)
        for got, want in ((k, sequential[1]), (v, sequential[2])):
            for b, length in enumerate(LENGTHS):
                stop = length + whole
                np.testing.assert_array_equal(
                    np.asarray(got.codes[b, :, :stop]).view(np.uint8),
                    np.asarray(want.codes[b, :, :stop]).view(np.uint8),
                )


def tree_case(name: str, dim: int = D) -> tuple[dict[str, Any], Cache]:
    """Arguments of ``attend`` for a tree of five nodes behind ``LENGTHS``."""
    cache, new = filled(name, dim=dim)
    parents, n = (0, 0, 0, 1, 3), 5
    sees = np.eye(n, dtype=bool)
    for i in range(1, n):
        sees[i] |= sees[parents[i]]
    k, v = (new[x][:, :n].transpose(0, 2, 1, 3) for x in "kv")
    depth = np.asarray([0, 1, 1, 2, 3])
    return {
        "q": new["q"][:, :n],
        "k": write(cache.layers[0].k, jnp.asarray(k), cache.lengths),
        "v": write(cache.layers[0].v, jnp.asarray(v), cache.lengths),
        "lengths": cache.lengths,
        "visible": Tree(jnp.asarray(sees)[None]),
        "positions": cache.lengths[:, None] + depth,
    }, cache


def poisoned(stored: kv_codec.PackedKV, written: int) -> kv_codec.PackedKV:
    """NaN for every scale behind ``written`` new slots, and codes of all bits."""
    slots = jnp.arange(S)
    stale = slots[None, :] >= (LENGTHS + written)[:, None]

    def spoil(x: jax.Array) -> jax.Array:
        bad = jnp.asarray(jnp.nan, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(-1)
        at = stale[:, None].reshape(B, 1, S, *[1] * (x.ndim - 3))
        return jnp.where(at, bad.astype(x.dtype), x)

    return kv_codec.each(spoil, stored)


@pytest.mark.parametrize("name", ALL)
def test_attention_over_a_narrow_cache_is_attention_over_what_it_stands_for(name: str) -> None:
    case, _ = tree_case(name)
    run = jax.jit(functools.partial(attend, **OPTIONS, implementation="xla"))
    want = run(**{**case, "k": kv_codec.decode(case["k"]), "v": kv_codec.decode(case["v"])})
    got = run(**{**case, "k": poisoned(case["k"], 5), "v": poisoned(case["v"], 5)})
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    exact = {x: kv_codec.decode(case[x]) for x in "kv"}
    assert not np.allclose(exact["k"], exact["v"])


@pytest.mark.parametrize("name", ["int8-static", "fp8"])
def test_kernels_read_eight_bits_as_xla_does(name: str) -> None:
    case, _ = tree_case(name)
    case |= {"k": poisoned(case["k"], 5), "v": poisoned(case["v"], 5)}
    want, got = (
        jax.jit(functools.partial(attend, **OPTIONS, implementation=i))(**case) for i in ("xla", KERNEL)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


def test_a_prompt_chunk_in_parts_takes_its_scales_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_implementations, "MOST_ROWS", 4)
    case, _ = tree_case("int8")
    want, got = (
        jax.jit(functools.partial(attend, **OPTIONS, implementation=i))(**case) for i in ("xla", KERNEL)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


def test_packed_codes_go_to_xla_by_name(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    case, _ = tree_case("rotor3")
    with pytest.raises(ConfigError, match=r"'tpu' kernel.*packed codes of a rotor3 cache.*'xla'"):
        attend(**case, **OPTIONS, implementation=KERNEL)
    adapter = dataclasses.replace(devices.current(), attention=KERNEL)
    monkeypatch.setattr(devices, "current", lambda: adapter)
    attention_module._report.cache_clear()
    own, xla = (
        jax.jit(functools.partial(attend, **OPTIONS, implementation=i))(**case) for i in (None, "xla")
    )
    np.testing.assert_array_equal(own, xla)
    assert len(caplog.records) == 1
    assert "rotor3" in caplog.text
    monkeypatch.setattr(devices, "current", lambda: dataclasses.replace(adapter, forced=True))
    with pytest.raises(ConfigError, match="rotor3"):
        attend(**case, **OPTIONS)


@pytest.mark.parametrize("name", ["bfloat16", "int8", "turbo4"])
def test_a_committed_path_takes_its_scales_along(name: str) -> None:
    case, cache = tree_case(name)
    path = np.asarray([[0, 1, 3, 4], [0, 2, 2, 2]], np.int32)
    accepted = np.asarray([3, 1], np.int32)
    tree = dataclasses.replace(cache, layers=(KV(case["k"], case["v"]),))
    kept = jax.jit(Cache.commit)(tree, path, accepted + 1)
    assert kept.lengths.tolist() == (LENGTHS + accepted + 1).tolist()
    for before, after in ((case["k"], kept.layers[0].k), (case["v"], kept.layers[0].v)):
        old, new = np.asarray(kv_codec.decode(before)), np.asarray(kv_codec.decode(after))
        for b, length in enumerate(LENGTHS):
            np.testing.assert_array_equal(new[b, :, :length], old[b, :, :length])
            moved = length + path[b, : accepted[b] + 1]
            np.testing.assert_array_equal(
                new[b, :, length : length + accepted[b] + 1], old[b, :, moved].swapaxes(0, 1)
            )


@pytest.mark.parametrize("name", ["int8", "turbo4"])
def test_what_all_keys_share_is_left_out_and_attention_does_not_notice(name: str) -> None:
    """Rows start at their own first key, whatever their neighbours do, and keep it while they grow."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((B, 2, HQ, D)).astype(np.float32)
    x = rng.standard_normal((2, B, HKV, S, D)).astype(np.float32)
    x[0] += 30 * rng.standard_normal((B, HKV, 1, D))
    cache = init_cache(layers=1, batch=B, capacity=S, kv_heads=HKV, head_dim=D, kv_form=name, centred=True)
    k, v = cache.layers[0].k, cache.layers[0].v
    assert v.centre is None
    lengths = jnp.zeros(B, jnp.int32)

    @jax.jit
    def attended(k: Any, v: Any) -> jax.Array:
        at = jnp.full((B,), S - 2)
        return attend(q, k, v, at, Causal(), at[:, None] + jnp.arange(2), scale=0.3)

    grow = jax.jit(write)
    for part in range(0, S, 8):
        k, v = (grow(c, jnp.asarray(y[:, :, part : part + 8]), lengths) for c, y in ((k, x[0]), (v, x[1])))
        np.testing.assert_array_equal(k.centre, x[0][:, :, 0])
        lengths = lengths + 8
    got = attended(k, v)
    np.testing.assert_allclose(got, attended(kv_codec.decode(k), kv_codec.decode(v)), rtol=0, atol=2e-4)
    exact = np.asarray(attended(jnp.asarray(x[0]), jnp.asarray(x[1])))
    size = np.sqrt((exact**2).mean())
    assert np.sqrt(((got - exact) ** 2).mean()) < (0.02 if name == "int8" else 0.25) * size
    again = grow(k, jnp.asarray(x[1][:, :, :1]), jnp.asarray([0, S - 1]))
    np.testing.assert_array_equal(again.centre, np.stack([x[1][0, :, 0], x[0][1, :, 0]]))


def test_scores_under_a_softcap_would_notice() -> None:
    for softcap, centred in ((None, True), (20.0, False)):
        config = tiny_config(attention_softcap=softcap)
        keys = decoder.init_cache(config, 1, 8, "int8").layers[0].k
        assert (keys.centre is not None) == centred
        assert (memory.cache_row_bytes(config, "int8") > 0) == centred


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [8, 10])
def test_counted_bytes_are_the_arrays(name: str, dim: int) -> None:
    config, slots = tiny_config(head_dim=dim), 16
    shape = jax.ShapeDtypeStruct((config.num_kv_heads, dim), jnp.float32)
    scales = CacheScales(k=(shape,) * 2, v=(shape,) * 2) if KVFormat(name).static else None
    cache = jax.eval_shape(lambda s: decoder.init_cache(config, 3, slots, name, s), scales)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    counted = 3 * (slots * memory.cache_bytes_per_token(config, name) + memory.cache_row_bytes(config, name))
    assert held == counted + memory.cache_scale_bytes(config, name)


def test_bytes_of_a_usual_head() -> None:
    """128 channels: bytes a token, head and side."""
    got = {
        name: KVFormat(name).vector_bytes(128)
        for name in ("bfloat16", "int8", "int8-static", "turbo4", "iso3")
    }
    assert got == {"bfloat16": 256, "int8": 132, "int8-static": 128, "turbo4": 68, "iso3": 52}
