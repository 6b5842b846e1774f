"""The text does not depend on which attention computes it, and a kernel that cannot run is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import devices
from eaglejax.devices import Attention
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.tree import from_choices
from eaglejax.errors import ConfigError
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn import attention as attention_module
from eaglejax.nn import attention_implementations
from eaglejax.nn.attention import attend
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Seen
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request

KERNEL = Attention("tpu", interpret=True)
TREE = from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
CONFIG = ModelConfig(
    family="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=48,
    rope=RopeConfig(),
    query_scale=8**-0.5,
    layers=(LayerSpec(window=11), LayerSpec()),
    attention_softcap=30.0,
)


@functools.cache
def weights():
    params = decoder.init_params(CONFIG, jax.random.key(12))
    return jax.tree.map(lambda x: x * 25 if x.ndim > 1 else x, params)


def proposer(kind):
    """A proposer and its weights."""
    if kind == "ngram chain":
        return NGram(length=3, max_ngram=2), None
    config = EagleConfig(
        version=3,
        vocab_size=32,
        draft_vocab_size=32,
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_aux=3,
        aux=(0, 1, 2),
        head_norm=True,
        own_head=True,
        windows=(7,),
    )
    made = eagle_model.init_eagle(config, jax.random.key(3))
    made = jax.tree.map(lambda x: x * 20 if x.ndim > 1 else x, made)
    target = Target(CONFIG, weights(), np.dtype("float32"), CONFIG.max_position)
    return Eagle(config, TREE), bind(config, made, target, None)


def decode(kind, attention):
    """Three ragged rows, the last longer than a prompt chunk, one of them sampled."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, 32, size).tolist()) for size in (1, 7, 19)]
    samplings = [Sampling(seed=0), Sampling(temperature=0.7, seed=3), Sampling(seed=0)]
    target = Target(CONFIG, weights(), np.dtype("float32"), CONFIG.max_position, eos_ids=(1000,))
    run = BatchDecoder(
        target,
        *proposer(kind),
        [Request(p, s, 24) for p, s in zip(prompts, samplings, strict=True)],
        options=DecodeOptions(rounds_a_chunk=4, prefill_width=16, attention=attention),
    )
    for _ in run:
        pass
    return run.results()


@pytest.mark.parametrize("kind", ["ngram chain", pytest.param("eagle tree", marks=pytest.mark.slow)])
def test_the_tokens_do_not_change_when_the_kernel_does(kind, monkeypatch):
    calls = []
    kernel = attention_module.IMPLEMENTATIONS["tpu"]

    def counted(q, *args, **options):
        calls.append((q.shape[1], options["interpret"]))
        return kernel(q, *args, **options)

    monkeypatch.setitem(attention_module.IMPLEMENTATIONS, "tpu", counted)
    plain = decode(kind, None)
    assert calls == []
    drawn = decode(kind, KERNEL)
    for a, b in zip(plain, drawn, strict=True):
        assert a.token_ids == b.token_ids
        assert a.stats.num_accepted_tokens == b.stats.num_accepted_tokens
    assert len({tuple(r.token_ids) for r in plain}) == 3
    assert sum(r.stats.num_accepted_tokens for r in plain) > 0
    assert {c[1] for c in calls} == {True}
    nodes = {"ngram chain": 4, "eagle tree": TREE.nodes}[kind]
    assert {16, nodes} <= {c[0] for c in calls}


def shapes(**changes):
    """Arguments of attend: four queries whose slots are the last of six."""
    rng = np.random.default_rng(changes.pop("seed", 0))
    size = {"b": 3, "n": 4, "m": 6, "hq": 4, "hkv": 2, "d": 8, "s": 32} | changes
    b, n, m, s = (size[x] for x in "bnms")
    kv = rng.standard_normal((2, b, size["hkv"], s, size["d"])).astype(np.float32)
    lengths = np.array([0, 7, s - m], np.int32)[:b]
    visible = rng.random((b, n, m)) < 0.5
    visible[:, np.arange(n), m - n + np.arange(n)] = True
    slot_positions = (lengths[:, None] + rng.integers(0, 4, (b, m))).astype(np.int32)
    return {
        "q": rng.standard_normal((b, n, size["hq"], size["d"])).astype(np.float32),
        "k": kv[0],
        "v": kv[1],
        "lengths": lengths,
        "visible": Seen(visible),
        "positions": slot_positions[:, m - n :],
        "slot_positions": slot_positions,
        "scale": 0.3,
    }


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 0.8)])
def test_the_kernel_equals_xla_where_earlier_slots_have_no_query(window, softcap):
    case = shapes()
    for b, length in enumerate(case["lengths"]):
        case["k"][b, :, length + 6 :] = np.nan
        case["v"][b, :, length + 6 :] = np.nan
    options = {"scale": case.pop("scale"), "window": window, "softcap": softcap}
    want, got = (
        jax.jit(functools.partial(attend, **options, implementation=i))(**case) for i in ("xla", "tpu")
    )
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("new", "window"), [(6, 3), (10, None)])
def test_a_prompt_chunk_of_more_rows_than_a_call_takes_is_attended_in_parts(new, window, monkeypatch):
    """Six queries of two heads and at most eight rows a call: prefix in parts of four, the rest in XLA."""
    monkeypatch.setattr(attention_implementations, "MOST_ROWS", 8)
    case = shapes(n=6, m=new)
    for b, length in enumerate(case["lengths"]):
        case["k"][b, :, length + new :] = np.nan
        case["v"][b, :, length + new :] = np.nan
    options = {"scale": case.pop("scale"), "window": window, "softcap": 0.8}
    want, got = (
        jax.jit(functools.partial(attend, **options, implementation=i))(**case) for i in ("xla", "tpu")
    )
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def half(dtype, **changes):
    case = shapes(**changes)
    return case | {name: jnp.asarray(case[name], dtype) for name in "qkv"}


def test_a_kernel_that_was_asked_for_is_refused_by_name_where_it_cannot_run():
    with pytest.raises(ConfigError, match=r"'tpu' kernel.*not float16.*'xla'"):
        attend(**half(jnp.float16), implementation=KERNEL)
    with pytest.raises(ConfigError, match=r"'gpu' kernel.*bfloat16"):
        attend(**shapes(), implementation=Attention("gpu", interpret=False))
    with pytest.raises(ConfigError, match="'magic' is not known"):
        attend(**shapes(), implementation="magic")
    if jax.__version__.startswith("0.10."):
        pytest.importorskip("absl")
        with pytest.raises(ConfigError, match=r"0\.12 or later"):
            attend(**half(jnp.bfloat16, d=64, s=64), implementation=Attention("gpu", interpret=True))


def test_an_adapters_own_choice_gives_way_to_xla_and_says_so(monkeypatch, caplog):
    adapter = dataclasses.replace(devices.current(), attention=KERNEL)
    monkeypatch.setattr(devices, "current", lambda: adapter)
    case = half(jnp.float16)
    attention_module._report.cache_clear()
    want = attend(**case, implementation="xla")
    for _ in range(2):
        np.testing.assert_array_equal(attend(**case), want)
    assert len(caplog.records) == 1
    assert "not float16" in caplog.text
    monkeypatch.setattr(devices, "current", lambda: dataclasses.replace(adapter, forced=True))
    with pytest.raises(ConfigError, match="not float16"):
        attend(**case)
