"""Which choices a device gets, how a user replaces them, and what the hand count of memory says."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from eaglejax import devices, pytree
from eaglejax.devices import Attention, adapter, chips, choice, gpu
from eaglejax.errors import ConfigError
from eaglejax.models import decoder, memory
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig
from experiments.limits import model
from kernels_pallas import cache_attention


def tpu(kind, **more):
    return SimpleNamespace(platform="tpu", device_kind=kind, **more)


def nvidia(kind="NVIDIA H100 80GB HBM3", capability="9.0", **more):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability, **more)


HERE = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
    ],
)
def test_a_tpu_by_its_kind(kind, generation):
    got = devices.choose(tpu(kind))
    assert got.generation == generation
    assert got.attention == Attention("tpu")
    assert got.chip is chips.TPUS[generation]
    assert 0 < got.memory_bytes < got.chip.device_memory
    assert got.weight_dtype == got.cache_dtype == "bfloat16"


def test_a_tpu7x_device_is_half_a_chip():
    chip = chips.TPUS["v7x"]
    assert devices.choose(tpu("TPU7x")).memory_bytes < 97 << 30
    assert chip.device_bandwidth == chip.bandwidth / 2


def test_the_device_says_how_much_memory_it_has():
    stats = {"bytes_limit": 7 << 30}
    assert devices.choose(tpu("TPU v4", memory_stats=lambda: stats)).memory_bytes == (7 << 30) - (512 << 20)
    assert devices.choose(nvidia(memory_stats=lambda: stats)).memory_bytes == 7 << 30


@pytest.mark.parametrize(
    ("capability", "kernels"), [("9.0", ("gpu",)), ("8.0", ()), ("10.0", ()), ("12.0", ())]
)
def test_a_gpu_by_its_capability(capability, kernels):
    got = devices.choose(nvidia("NVIDIA GPU", capability))
    assert got.attention == devices.XLA
    assert got.kernels == kernels
    assert got.generation == "sm_" + capability.replace(".", "")
    assert ("wgmma" in dict(got.reasons)["attention"]) == (not kernels)
    forced = {"attention": "gpu"}
    if kernels:
        got = devices.choose(nvidia("NVIDIA GPU", capability), forced)
        assert (got.attention.implementation, got.forced) == ("gpu", True)
    else:
        with pytest.raises(ConfigError, match=r"'gpu' attention kernel cannot be compiled.*'xla'"):
            devices.choose(nvidia("NVIDIA GPU", capability), forced)


def test_an_old_gpu_has_no_bfloat16_products():
    assert devices.choose(nvidia("Tesla V100-SXM2-16GB", "7.0")).weight_dtype == "float16"


def test_jax_takes_a_share_of_a_gpu(monkeypatch):
    monkeypatch.delenv(gpu.FRACTION_VARIABLE, raising=False)
    assert devices.choose(nvidia("NVIDIA H200", "9.0")).memory_bytes == int(141e9 * 0.75)
    monkeypatch.setenv(gpu.FRACTION_VARIABLE, "0.9")
    assert devices.choose(nvidia("NVIDIA H200", "9.0")).memory_bytes == int(141e9 * 0.9)


def test_this_cpu():
    got = devices.choose(jax.devices("cpu")[0])
    attention = devices.XLA if cache_attention.KERNEL.unavailable() else adapter.CPU
    assert (got.name, got.attention, got.kernels) == ("cpu", attention, ())
    assert devices.current() == got
    assert devices.current() is devices.current()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (tpu("TPU v3"), "'TPU v3' is not known; known are TPU v4"),
        (SimpleNamespace(platform="metal"), "'metal'"),
    ],
)
def test_an_unknown_device_is_refused(device, message):
    with pytest.raises(ConfigError, match=message):
        devices.choose(device)


def test_overrides_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "adapter.toml"
    path.write_text('attention = "tpu"\nblock_kv = 256\ncache_dtype = "int8"\nmemory_gib = 2\n')
    got = devices.choose(HERE, path)
    assert got.attention == Attention("tpu", block_kv=256)
    assert (got.cache_dtype, got.memory_bytes, got.forced) == ("int8", 2 << 30, True)
    reasons = dict(got.reasons)
    assert {reasons[k] for k in ("attention", "cache_dtype", "memory_bytes")} == {"chosen by the user"}
    assert reasons["mesh"] != "chosen by the user"

    monkeypatch.setenv(choice.VARIABLE, str(path))
    devices.current.cache_clear()
    try:
        assert devices.current().attention == got.attention
    finally:
        devices.current.cache_clear()
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("device", "overrides", "message"),
    [
        (HERE, {"blocks": 3}, "'blocks' is not known; known are attention"),
        (HERE, {"attention": "flash"}, "'flash' is not known"),
        (HERE, {"attention": "npu"}, "'npu' is not known; use one of xla, tpu, gpu, cpu"),
        (HERE, {"block_kv": 128}, "belong to the Pallas kernels"),
        (HERE, {"attention": "tpu", "block_kv": 100}, "multiple of 128"),
        (HERE, {"attention": "tpu", "block_kv": True}, "must be of type int"),
        (HERE, {"attention": "tpu", "interpret": False}, "cannot be compiled for cpu"),
        (tpu("TPU v4"), {"attention": "gpu", "interpret": False}, "it runs the 'tpu' kernel"),
        (tpu("TPU v4"), {"attention": "cpu"}, "'cpu' attention kernel runs on a CPU"),
        (HERE, {"attention": "cpu", "interpret": True}, "'tpu' or 'gpu', not to 'cpu'"),
        (HERE, {"weight_dtype": "int7"}, "'int7' is not known"),
        (HERE, {"matmul_precision": "most"}, "highest"),
        (HERE, {"memory_gib": 0}, "must be positive"),
    ],
)
def test_overrides_that_cannot_be_are_refused(device, overrides, message):
    with pytest.raises(ConfigError, match=message):
        devices.choose(device, overrides)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        devices.choose(HERE, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a =")
    with pytest.raises(ConfigError, match="is not TOML"):
        devices.choose(HERE, tmp_path / "bad.toml")


def test_blocks_hide_a_step_and_fit_their_scores():
    v5e, v5p, h100 = (devices.choose(d) for d in (tpu("TPU v5e"), tpu("TPU v5p"), nvidia()))
    few = {"head_dim": 128, "dtype": "bfloat16", "rows": 16}
    # A step of v5e must move about 0.35 us x 819 GB/s = 287 kB: 512 slots move 262 kB, 1024 move 524 kB.
    assert v5e.block_kv(**few) == 1024
    assert v5e.block_kv(**few | {"head_dim": 256}) == 512
    assert v5e.block_kv(**few | {"dtype": "int8"}) == 2048
    assert v5p.block_kv(**few) == 2048
    # 1 MiB of float32 scores: 2048 rows leave 128 slots.
    assert v5e.block_kv(**few | {"rows": 2048}) == 128
    assert v5e.block_kv(**few | {"rows": 1024}) == 256
    assert h100.block_kv(**few) is None
    tuned = dataclasses.replace(v5e, blocks=((128, "bfloat16", 256),))
    assert tuned.block_kv(**few) == 256
    assert tuned.block_kv(**few | {"dtype": "int8"}) == 2048


BASE = ModelConfig(
    family="llama",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    max_position=64,
    rope=RopeConfig(),
    query_scale=1.0,
)
MOE = MoeConfig(5, 2, 16, scores="softmax", normalize=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": True, "sandwich_norms": True},
        {"layers": (LayerSpec(moe=MOE), LayerSpec(), LayerSpec(moe=MOE))},
    ],
)
def test_counted_weights_are_the_table_s(changes):
    config = dataclasses.replace(BASE, **changes)
    table = pytree.abstract(decoder.param_table(config))
    assert memory.parameter_count(config) == sum(x.size for x in jax.tree.leaves(table))


def test_counted_cache_is_the_cache():
    cache = jax.eval_shape(lambda: decoder.init_cache(BASE, 2, 16, jnp.bfloat16))
    got = 2 * 16 * memory.cache_bytes_per_token(BASE, "bfloat16")
    assert got == sum(x.size * 2 for x in jax.tree.leaves(cache.layers))
    assert memory.cache_bytes_per_token(BASE, "int8") == 2 * 3 * 2 * (10 + 4)
    assert memory.cache_bytes_per_token(BASE, "bfloat16", lanes=128) == 2 * 3 * 2 * (10 + 128) * 2
    assert memory.cache_bytes_per_token(BASE, "bfloat16", lanes=5) == 2 * 3 * 2 * 10 * 2


def test_largest_batch_and_context_fill_the_memory():
    """An 8B target on a v6e chip and on four v5e chips, bfloat16."""
    v6e, v5e = devices.choose(tpu("TPU v6e")), devices.choose(tpu("TPU v5e"))
    config = model("8B")
    assert memory.parameter_count(config) == pytest.approx(8.03e9, rel=1e-3)
    assert memory.cache_bytes_per_token(config, "bfloat16") == 131072
    for chip, shards in ((v6e, 1), (v5e, 4)):
        got = memory.footprint_on(chip, config, nodes=64, shards=shards)
        assert got.available > got.weights
        batch = got.largest_batch(8192)
        assert batch > 1
        assert got.total(batch, 8192) <= got.available < got.total(batch + 1, 8192)
        context = got.largest_context(batch)
        assert got.total(batch, context) <= got.available < got.total(batch, context + 1)
    with pytest.raises(ConfigError, match=r"29\.9 GiB.*at least 2 times as many"):
        memory.footprint_on(v5e, config, weight_dtype="float32").largest_batch(1)
    # The bfloat16 weights of 8B fit a v5e, but leave no room for a row of 8192 tokens; 8 bits do.
    assert memory.footprint_on(v5e, config).largest_batch(8192) == 0
    assert memory.footprint_on(v5e, config, weight_dtype="int8").largest_batch(8192) > 1
    assert memory.footprint_on(v5e, config).largest_context(64) == 0


def test_scores_count_where_xla_attends():
    kernel = devices.choose(tpu("TPU v6e"))
    plain = dataclasses.replace(kernel, attention=devices.XLA)
    config = model("8B")
    slots, new = memory.footprint_on(plain, config), memory.footprint_on(kernel, config)
    assert slots.per_token - new.per_token == 512 * 32 * (4 + 2 + 1)
    assert new.per_row - slots.per_row == 512 * 512 * 32 * (4 + 2 + 1)
    # Eight key/value heads split over four devices but not over three.
    four, three = (memory.footprint_on(kernel, config, shards=n).per_token for n in (4, 3))
    assert four * 4 == three


def test_mesh_defaults_shard_what_the_tables_name():
    mesh = devices.current().mesh
    rules = dict(mesh.rules)
    table = decoder.param_table(dataclasses.replace(BASE, layers=(LayerSpec(moe=MOE),) * 3))
    named = {a for i in jax.tree.leaves(table, is_leaf=pytree.is_info) for a in i.axes if a}
    assert named - {"embed"} <= set(rules)
    assert set(rules.values()) == set(mesh.axes)
    assert [mesh.shape(n, 8) for n in (1, 4, 8, 16, 6)] == [(1, 1), (1, 4), (1, 8), (2, 8), (3, 2)]
