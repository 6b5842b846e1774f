"""Narrow caches in the decoder: read as sequential decoding reads them, recomputed, safe from broken keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import (
    BATCH,
    CAPACITY,
    CASES,
    CONTEXT,
    GREEDY,
    NO_EOS,
    VOCAB,
    WIDTH,
    Case,
    decode,
    pad,
    prompts,
    tiny_config,
    tiny_target,
)

from eaglejax import devices, sampling
from eaglejax.devices import Attention, memory
from eaglejax.drafts import eagle_model
from eaglejax.drafts.draft_model import DraftModel
from eaglejax.drafts.eagle import Eagle
from eaglejax.drafts.eagle_config import EagleConfig
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError
from eaglejax.models import decoder
from eaglejax.nn import attention as attention_module
from eaglejax.nn import attention_implementations, kv_codec
from eaglejax.nn.attention import attend, write_and_attend
from eaglejax.nn.cache import CacheScales, KVCache, commit, init_cache, write
from eaglejax.nn.kv_format import FORMATS, KVFormat
from eaglejax.quant.kv import calibrate_cache
from eaglejax.speculate import round

NARROW = [name for name in FORMATS if not KVFormat(name).plain]
SOME = ["int8", "int8-static", "turbo4"]
ALL = SOME + [pytest.param(name, marks=pytest.mark.slow) for name in NARROW if name not in SOME]
B, HQ, HKV, D, S = 2, 4, 2, 8, 32
LENGTHS = np.asarray([3, 12], np.int32)
NEW = 17
WIDTHS = (1, 2, 3, 4, 8, 9, 17)
OPTIONS = {"scale": 0.4, "window": 9, "softcap": 20.0}
KERNEL = Attention("pallas", "tpu", interpret=True)


def filled(name: str, seed: int = 0, dim: int = D) -> tuple[KVCache, dict[str, np.ndarray]]:
    """One layer with random rows of ``LENGTHS`` tokens, and q, k, v [B, 17, heads, d] of tokens to come."""
    rng = np.random.default_rng(seed)
    scales = None
    if KVFormat(name).static:
        channels = jnp.asarray(rng.uniform(0.015, 0.03, (HKV, dim)), jnp.float32)
        scales = CacheScales(k=(channels,), v=(1.5 * channels,))
    cache = init_cache(layers=1, batch=B, capacity=S, kv_heads=HKV, head_dim=dim, format=name, scales=scales)
    old = rng.standard_normal((2, B, HKV, LENGTHS.max(), dim)).astype(np.float32)
    zeros = jnp.zeros(B, jnp.int32)
    cache = KVCache(
        k=(write(cache.k[0], jnp.asarray(old[0]), zeros),),
        v=(write(cache.v[0], jnp.asarray(old[1]), zeros),),
        lengths=jnp.asarray(LENGTHS),
    )
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
    def chains(cache: KVCache, new: dict[str, jax.Array]) -> list[tuple[jax.Array, Any, Any]]:
        out = []
        for n in WIDTHS:
            causal = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (B, n, n))

            def step(stored: Any, start: jax.Array, n: int = n, causal: jax.Array = causal) -> Any:
                lengths = cache.lengths + start
                part = [jax.lax.dynamic_slice_in_dim(new[x], start, n, axis=1) for x in "qkv"]
                positions = lengths[:, None] + jnp.arange(n)
                result, k, v = write_and_attend(*part, *stored, lengths, causal, positions, **OPTIONS)
                return (k, v), result

            starts = jnp.arange(0, NEW - NEW % n, n)
            (k, v), parts = jax.lax.scan(step, (cache.k[0], cache.v[0]), starts)
            out.append((parts.transpose(1, 0, 2, 3, 4).reshape(B, -1, HQ, D), k, v))
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


def tree_case(name: str, dim: int = D) -> tuple[dict[str, Any], KVCache]:
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
        "k": write(cache.k[0], jnp.asarray(k), cache.lengths),
        "v": write(cache.v[0], jnp.asarray(v), cache.lengths),
        "lengths": cache.lengths,
        "visible": jnp.broadcast_to(jnp.asarray(sees), (B, n, n)),
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
    tree = dataclasses.replace(cache, k=(case["k"],), v=(case["v"],))
    kept = jax.jit(commit)(tree, path, accepted)
    assert kept.lengths.tolist() == (LENGTHS + accepted + 1).tolist()
    for before, after in ((case["k"], kept.k[0]), (case["v"], kept.v[0])):
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
    cache = init_cache(layers=1, batch=B, capacity=S, kv_heads=HKV, head_dim=D, format=name, centred=True)
    (k,), (v,) = cache.k, cache.v
    assert v.centre is None
    lengths = jnp.zeros(B, jnp.int32)

    @jax.jit
    def attended(k: Any, v: Any) -> jax.Array:
        at = jnp.full((B,), S - 2)
        visible = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (B, 2, 2))
        return attend(q, k, v, at, visible, at[:, None] + jnp.arange(2), scale=0.3)

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
        keys = decoder.init_cache(config, 1, 8, "int8").k[0]
        assert (keys.centre is not None) == centred
        assert (memory.cache_row_bytes(config, "int8") > 0) == centred


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [8, 10])
def test_counted_bytes_are_the_arrays(name: str, dim: int) -> None:
    config, slots = tiny_config(head_dim=dim), 16
    shape = jax.ShapeDtypeStruct((config.num_kv_heads, dim), jnp.float32)
    scales = CacheScales(k=(shape,) * 2, v=(shape,) * 2) if KVFormat(name).static else None
    cache = jax.eval_shape(lambda s: decoder.init_cache(config, 3, slots, name, s), scales)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((cache.k, cache.v)))
    counted = 3 * (slots * memory.cache_bytes_per_token(config, name) + memory.cache_row_bytes(config, name))
    assert held == counted + memory.cache_scale_bytes(config, name)


def test_bytes_of_a_usual_head() -> None:
    """128 channels: bytes a token, head and side."""
    got = {
        name: KVFormat(name).vector_bytes(128)
        for name in ("bfloat16", "int8", "int8-static", "turbo4", "iso3")
    }
    assert got == {"bfloat16": 256, "int8": 132, "int8-static": 128, "turbo4": 68, "iso3": 52}


@functools.partial(jax.jit, static_argnums=(1, 3))
def full_forward(
    params: Any, config: Any, tokens: jax.Array, form: str, scales: CacheScales | None
) -> tuple[jax.Array, KVCache]:
    """Logits [B, T, V] and the cache after one causal forward over ``tokens`` [B, T] from nothing."""
    batch, size = tokens.shape
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    empty = decoder.init_cache(config, batch, size, form, scales)
    out = decoder.forward(params, config, tokens, place, empty, causal)
    return decoder.unembed(params, config, out.hidden), out.cache


@functools.cache
def target_of(form: str) -> Any:
    """The tiny target with its cache in ``form``."""
    target = tiny_target()
    scales = calibrate_cache(target, prompts()) if KVFormat(form).static else None
    return dataclasses.replace(target, cache_format=form, cache_scales=scales)


@functools.cache
def greedy_texts(form: str) -> tuple[tuple[int, ...], ...]:
    """Prompts continued to the context's end, one argmax at a time, over a cache in ``form``."""
    target, texts = target_of(form), [list(p) for p in prompts()]
    while min(map(len, texts)) < CONTEXT:
        logits = full_forward(target.params, target.config, pad(texts), form, target.cache_scales)[0]
        for row, text in enumerate(texts):
            if len(text) < CONTEXT:
                text.append(int(logits[row, len(text) - 1].argmax()))
    return tuple(map(tuple, texts))


def start(program: round.Program, params: round.Params, form: str, scales: CacheScales | None) -> Any:
    """The state after the prompts."""
    lengths = np.asarray([len(p) for p in prompts()])
    state = round.jit_init_state(
        program,
        params,
        sampling.rows([GREEDY] * BATCH, VOCAB, prompts()),
        capacity=CAPACITY,
        budget=jnp.asarray(CONTEXT - lengths, jnp.int32),
        eos=jnp.asarray(NO_EOS, jnp.int32),
        cache_dtype=KVFormat(form),
        cache_scales=scales,
    )
    text = pad(prompts(), CONTEXT + 1)
    for begin in range(0, max(lengths), WIDTH):
        count = np.clip(lengths - begin, 0, WIDTH).astype(np.int32)
        parts = (text[:, begin : begin + WIDTH], text[:, begin + 1 : begin + WIDTH + 1], count)
        last = jnp.asarray((count > 0) & (lengths <= begin + WIDTH))
        state, _ = round.jit_prefill_chunk(program, params, state, *map(jnp.asarray, parts), last)
    return state


def assert_cache_is(cache: KVCache, lengths: np.ndarray, reference: KVCache) -> None:
    """Every committed slot stands for the same numbers. A code may be the neighbour where rounding decides,
    which few numbers show."""
    for cached, fresh in zip((*cache.k, *cache.v), (*reference.k, *reference.v), strict=True):
        got, want = kv_codec.decode(cached), kv_codec.decode(fresh)
        for row, length in enumerate(lengths):
            a, b = np.asarray(got[row, :, :length]), np.asarray(want[row, :, :length])
            assert np.isclose(a, b, rtol=2e-3, atol=2e-4).mean() > 0.99
            assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(b)


NARROW_DRAFT = Case(DraftModel(tiny_config(), length=2, cache_dtype="rotor4"), "model")
FAST = [("turbo3", CASES["mixed"]), ("int8", NARROW_DRAFT)]
LOOPS = FAST + [
    pytest.param(form, case, marks=pytest.mark.slow)
    for form in NARROW
    for case in (CASES["mixed"], NARROW_DRAFT, CASES["ngram"])
    if (form, case) not in FAST
]


@pytest.mark.parametrize(("form", "case"), LOOPS)
def test_rounds_give_sequential_tokens_and_the_state_of_their_text(form: str, case: Case) -> None:
    """Laws 1 and 4, and one program for every acceptance length."""
    target, texts = target_of(form), greedy_texts(form)
    program = round.Program(target.config, case.proposer)
    reference = full_forward(target.params, target.config, pad(texts), form, target.cache_scales)[1]
    sizes, accepted = [], []
    for turn in (0, 1):
        params = round.Params(target.params, case.params(texts, turn=turn))
        state = start(program, params, form, target.cache_scales)
        lengths = np.asarray([len(p) for p in prompts()])
        for _ in range(7):
            assert np.asarray(state.cache.lengths).tolist() == lengths.tolist()
            assert np.asarray(state.root).tolist() == [t[n] for t, n in zip(texts, lengths, strict=True)]
            assert_cache_is(state.cache, lengths, reference)
            state, records, _ = round.jit_run_rounds(
                program, params, state, jax.device_put(np.int32(1)), most=4
            )
            count = np.asarray(records.count)[0]
            for row, text in enumerate(texts):
                end = lengths[row] + 1 + count[row]
                assert np.asarray(records.tokens)[0, row, : count[row]].tolist() == list(
                    text[lengths[row] + 1 : end]
                )
            accepted += np.asarray(records.accepted)[0].tolist()
            lengths = lengths + count
        sizes.append(round.jit_run_rounds._cache_size())
    assert len(set(accepted)) > 2
    assert sizes[0] == sizes[1]


def test_the_formats_texts_are_not_all_the_same() -> None:
    """Or else the test above would show nothing about what is read from the cache."""
    assert greedy_texts("turbo3") != greedy_texts("int8")


@pytest.mark.slow
def test_whole_answers_with_narrow_caches_on_both_sides() -> None:
    """Through the public decoder: formats of target and draft chosen apart, the target's by the target."""
    texts = greedy_texts("int8")
    want = [list(t[len(p) :]) for t, p in zip(texts, prompts(), strict=True)]
    for cache in (None, "fp8"):
        case = Case(DraftModel(tiny_config(), length=2, cache_dtype=cache), "model")
        results = decode(case.proposer, case.params(texts, turn=1), prompts(), target=target_of("int8"))
        assert [r.token_ids for r in results] == want
    plain = decode(CASES["ar"].proposer, None, prompts(), target=tiny_target(), cache_dtype="int8")
    assert [r.token_ids for r in plain] == want


def test_an_eagle_draft_keeps_its_own_cache_in_any_format() -> None:
    config = EagleConfig(
        version=1,
        vocab_size=32,
        draft_vocab_size=32,
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    params = eagle_model.EagleParams(
        eagle_model.init_eagle(config, jax.random.key(0)), embed=jnp.ones((32, 16)), head=jnp.ones((16, 32))
    )
    state = Eagle(config, chain(2), cache_dtype="iso3").init(params, batch=2, capacity=16)
    assert state.cache.k[0].format == KVFormat("iso3")
    assert state.cache.k[0].codes.shape == (2, 1, 17, 3)
    with pytest.raises(ConfigError, match="draft's cache cannot be 'int8-static'"):
        Eagle(config, chain(2), cache_dtype="int8-static")
    with pytest.raises(ConfigError, match="draft's cache cannot be 'int8-static'"):
        DraftModel(tiny_config(), cache_dtype="int8-static")


def test_calibrated_scales_cut_nothing_of_their_prompts_and_outlive_a_donated_cache() -> None:
    target = tiny_target()
    scales = calibrate_cache(target, prompts(), width=5)
    exact = full_forward(target.params, target.config, pad(prompts()), "float32", None)[1]
    for side, stored in (("k", exact.k), ("v", exact.v)):
        for found, layer in zip(getattr(scales, side), stored, strict=True):
            top = np.max([np.abs(layer[r, :, : len(p)]).max(1) for r, p in enumerate(prompts())], axis=0)
            np.testing.assert_allclose(found, top / 127, rtol=1e-4)
    make = jax.jit(lambda s: decoder.init_cache(target.config, 1, 16, "int8-static", s))
    cache = make(scales)
    jax.jit(lambda c: c, donate_argnums=0)(cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert not any(x.is_deleted() for x in jax.tree.leaves(scales))


BROKEN = 31


def broken_target(form: str, attention: Attention | None) -> Any:
    """The tiny target, but one token's embedding is not a number."""
    target = tiny_target()
    params = {**target.params, "embed": target.params["embed"].at[BROKEN].set(jnp.nan)}
    config = tiny_config(attention=attention)
    return dataclasses.replace(target, params=params, config=config, cache_format=form)


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("float32", None),
        ("int8", KERNEL),
        pytest.param("float32", KERNEL, marks=pytest.mark.slow),
        pytest.param("turbo4", None, marks=pytest.mark.slow),
    ],
)
def test_a_broken_draft_reaches_neither_its_siblings_nor_the_rest_of_the_text(
    form: str, attention: Attention | None
) -> None:
    """Tokens 30 and 31 are drafted side by side; 31 cannot be computed. Its own place and what descends from
    it are not finite, all else is untouched, in this forward and from the cache in the next."""
    sound = dataclasses.replace(tiny_target(), config=tiny_config(attention=attention))
    broken = broken_target(form, attention)
    sees = np.eye(5, dtype=bool)
    sees[:, 0] = True
    sees[3, 1] = sees[4, 2] = True
    tokens = np.asarray([[5, 30, BROKEN, 7, 8]] * 2, np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(config: Any, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = decoder.init_cache(config, 2, 16, form)
        out = decoder.forward(
            params, config, tokens, jnp.asarray([[0, 1, 1, 2, 2]] * 2), cache, sees[None].repeat(2, 0)
        )
        kept = commit(out.cache, jnp.asarray([[0, 1, 3]] * 2), jnp.asarray([2, 2]))
        one = jnp.ones((2, 1, 1), bool)
        after = decoder.forward(params, config, jnp.full((2, 1), 3), kept.lengths[:, None], kept, one)
        return out.hidden, after.hidden

    mixed, after = run(broken.config, broken.params, tokens)
    assert np.isfinite(mixed[:, [0, 1, 3]]).all()
    assert np.isnan(mixed[:, [2, 4]]).all()
    want, want_after = run(sound.config, sound.params, tokens)
    np.testing.assert_allclose(mixed[:, [0, 1, 3]], want[:, [0, 1, 3]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(after, want_after, rtol=0, atol=1e-5)


def test_a_prompt_that_cannot_be_computed_ends_its_row_whatever_its_last_chunk_is() -> None:
    starts = [prompts()[0], (4, BROKEN, *prompts()[2]), prompts()[1]]
    results = decode(CASES["ar"].proposer, None, starts, target=broken_target("float32", None), limits=3)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert results[1].token_ids == []
    assert "NaN or infinite after 0 tokens" in results[1].error
    whole = decode(CASES["ar"].proposer, None, [starts[0], starts[2]], limits=3)
    assert [results[0].token_ids, results[2].token_ids] == [r.token_ids for r in whole]


@pytest.mark.parametrize(
    ("form", "scales", "match"),
    [
        ("int8-static", None, "needs calibrated scales"),
        ("int8", "good", "not for 'int8'"),
        ("int8-static", "short", r"must be 2 arrays of shape \(2, 8\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused(form: str, scales: str | None, match: str) -> None:
    one = jnp.ones((2, 8))
    given = {
        None: None,
        "good": CacheScales(k=(one,) * 2, v=(one,) * 2),
        "short": CacheScales(k=(one,), v=(one,)),
    }
    with pytest.raises(ConfigError, match=match):
        decoder.init_cache(tiny_config(), 1, 16, form, given[scales])
