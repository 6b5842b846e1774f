"""The C++ kernels over a cache: what they compute, that queries are independent, how they stand in jax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_tools import HKV, HQ, LENGTHS, SCALE, B, D, M, N, S, inputs, oracle, wide

from eaglejax import devices
from eaglejax.devices import adapter as adapters
from eaglejax.errors import ConfigError
from eaglejax.nn.attention import attend, attention_by
from eaglejax.nn.cache import Placement
from eaglejax.nn.kv import KV, init_cache, write
from eaglejax.nn.visible import Seen, Tree
from kernels_pallas import cache_attention as kernels
from kernels_pallas import foreign, native

LEVEL, WHY = kernels.KERNEL.status()
pytestmark = pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")

# The level between shares its code with one or the other.
LEVELS = [level for level in native.levels_here() if level in kernels.KERNEL.levels]


@pytest.fixture(
    params=[
        level if level in (LEVEL, "avx2") else pytest.param(level, marks=pytest.mark.slow) for level in LEVELS
    ]
)
def level(request, monkeypatch):
    monkeypatch.setenv(native.LEVEL_VARIABLE, request.param)
    return request.param


@functools.partial(jax.jit, static_argnames=("implementation", "window"))
def chosen(q, k, v, lengths, visible, positions, places, implementation, window=None):
    return attend(
        q,
        k,
        v,
        lengths,
        Seen(visible),
        positions,
        slot_positions=places,
        scale=SCALE,
        window=window,
        implementation=implementation,
    )


def write_and_attend(q, k, v, keys, values, lengths, visible, positions, slot_positions=None, **options):
    """What a layer does: the result, and its keys and values with the new tokens."""
    at = Placement(lengths, positions, Seen(visible), slot_positions)
    with attention_by(options.pop("attention", None)):
        out, layer = KV(keys, values).attend(q, k, v, at, **options)
    return out, layer.k, layer.v


def call(arguments, k_scale=None, v_scale=None, *, window=None, softcap=None, out_dtype=jnp.float32):
    return kernels.cache_attention(
        *arguments, k_scale, v_scale, scale=SCALE, window=window, softcap=softcap, out_dtype=out_dtype
    )


def poisoned(x):
    """x with nan, or the largest code, in slots that were never written."""
    x = np.array(x)
    for b, length in enumerate(LENGTHS):
        x[b, :, length + M :] = 127 if x.dtype == np.int8 else np.nan
    return jnp.asarray(x)


# One, two, three and more registers a head.
@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (16, {}),
        (32, {"window": 6}),
        (48, {"softcap": 0.8}),
        (80, {"window": 3, "softcap": 2.0}),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_definition(level, dim, options, dtype):
    q, k, v, *rest = inputs(dim, dtype)
    got = call((q, poisoned(k), poisoned(v), *rest), **options)
    want = oracle(*map(wide, (q, k, v)), *map(np.asarray, rest), **options)
    np.testing.assert_allclose(got, want, atol=3e-6)
    rounded = call((q, k, v, *rest), out_dtype=jnp.bfloat16, **options)
    np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


@pytest.mark.parametrize("scaled", [True, False])
def test_codes_of_eight_bits(level, scaled):
    q, _, _, *rest = inputs()
    rng = np.random.default_rng(3)
    k, v = rng.integers(-127, 128, (2, B, HKV, S, D)).astype(np.int8)
    scales = rng.random((2, B, HKV, S)).astype(np.float32) / 40
    given = [poisoned(x) for x in scales] if scaled else (None, None)
    q = q / (1 if scaled else 40)
    got = call((q, poisoned(k), poisoned(v), *rest), *given)
    factors = scales[..., None] if scaled else np.ones((2, 1))
    want = oracle(wide(q), wide(k) * factors[0], wide(v) * factors[1], *map(np.asarray, rest))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_query_that_sees_nothing_yields_zeros_and_extremes_stay_finite(level):
    q, k, v, lengths, visible, *rest = inputs()
    blind = visible.at[0, 2].set(False)
    got = np.asarray(call((q, k, v, lengths, blind, *rest)))
    assert not got[0, 2].any()
    assert got[0, 3].any()
    # Scores of 1e38 apart, and some that are infinite: the softmax is the largest one's value.
    sharp = q.at[:, :, :, 1:].set(0).at[:, :, :, 0].set(1e19)
    keys = (k * 0).at[:, :, :, 0].set(-1e19).at[:, :, 3, 0].set(1e19).at[:, :, 4, 0].set(-3e38)
    got = call((sharp, keys, v, lengths, visible, *rest))
    np.testing.assert_array_equal(got[1:], jnp.repeat(v[1:, None, :, 3], HQ // HKV, axis=2).repeat(N, axis=1))
    nan = call((q.at[1, 1, 1, 0].set(jnp.nan), k, v, lengths, visible, *rest))
    assert np.argwhere(np.isnan(nan).any(axis=-1)).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 3.0}])
def test_a_node_has_the_same_bits_in_a_tree_and_alone(dtype, options):
    """A tree of 16 whose even rows stand behind 21 tokens, against each path decoded token by token."""
    nodes, length, rng = 16, 21, np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes))]
    paths = [[0]]
    for i in range(1, nodes):
        paths.append([*paths[parents[i]], i])
    q = jnp.asarray(rng.normal(size=(2, nodes, HQ, D)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(2, nodes, HKV, D)), dtype) for _ in range(2))
    caches = [jnp.asarray(rng.normal(size=(2, HKV, S, D)), dtype) for _ in range(2)]
    lengths = jnp.asarray([length, 4])
    step = jax.jit(functools.partial(write_and_attend, scale=SCALE, attention=adapters.CPU, **options))
    visible = np.zeros((2, nodes, nodes), bool)
    for i, path in enumerate(paths):
        visible[:, i, path] = True
    depth = jnp.asarray([len(path) - 1 for path in paths])
    tree, *_ = step(q, k, v, *caches, lengths, visible, lengths[:, None] + depth)
    leaves = set(range(nodes)) - set(parents)
    for leaf in leaves:
        keys, values = (c[:1] for c in caches)
        for place, node in enumerate(paths[leaf]):
            at = lengths[:1] + place
            alone, keys, values = step(
                *(x[:1, node : node + 1] for x in (q, k, v)),
                keys,
                values,
                at,
                np.ones((1, 1, 1), bool),
                at[:, None],
            )
            np.testing.assert_array_equal(alone[0, 0], tree[0, node])


def test_long_caches_and_many_queries_take_several_tasks():
    """More queries than a task has, more work than a thread takes, against XLA's attention."""
    rng = np.random.default_rng(4)
    n, slots = 40, 700
    q = jnp.asarray(rng.normal(size=(2, n, 4, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, slots, 64)), jnp.float32) for _ in range(2))
    lengths = jnp.asarray([600, 33])
    visible = np.broadcast_to(np.tril(np.ones((n, n), bool)), (2, n, n))
    positions = lengths[:, None] + jnp.arange(n)
    for window in (None, 128):
        ours, xlas = (
            chosen(q, k, v, lengths, visible, positions, positions, name, window) for name in ("cpu", "xla")
        )
        np.testing.assert_allclose(ours, xlas, atol=1e-5)


def test_lengths_without_room_are_cut_as_xla_cuts_them():
    q, k, v, _, visible, positions, places = inputs()
    for lengths in (jnp.asarray([S, S - 2, 0]), jnp.asarray([S + 99, S - M + 1, 3])):
        ours, xlas = (chosen(q, k, v, lengths, visible, positions, places, name) for name in ("cpu", "xla"))
        np.testing.assert_allclose(ours, xlas, atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("tail", [(6,), ()])
def test_a_write_is_a_row_of_updates(dtype, tail):
    rng = np.random.default_rng(2)
    cached = jnp.asarray(rng.integers(0, 100, (4, 2, 9, *tail)), dtype)
    fresh = jnp.asarray(rng.integers(0, 100, (4, 2, 3, *tail)), dtype)
    want = np.array(cached)
    for row, start in enumerate((0, 5, 6, 6)):
        want[row, :, start : start + 3] = fresh[row]
    # Where there is no room, the last slots are written.
    got = kernels.cache_write(cached, fresh, jnp.asarray([0, 5, 6, 8]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    # What the caller still holds is as it was.
    assert not np.array_equal(cached, want)


def test_writes_are_in_place_where_the_cache_is_given_away():
    """Rounds of a loop over a donated bfloat16 cache hold no copy of it."""
    rows, nodes, slots, dim = 8, 3, 512, 64
    cache = init_cache(layers=1, batch=rows, capacity=slots, kv_heads=2, head_dim=dim, kv_form="bfloat16")
    side = cache.layers[0].k.nbytes

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, q):
        # A root with two children, of which the second is accepted, as the attention's result says.
        visible = Tree(jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool))
        depth = jnp.asarray([0, 1, 1])

        def body(carry):
            i, cache, q = carry
            new = jnp.stack([q[:, :, 0] * (n + 1) for n in range(2)], axis=2)
            at = cache.lengths[:, None] + depth
            out, layer = cache.layers[0].attend(q, new, new, Placement(cache.lengths, at, visible), scale=0.1)
            cache = dataclasses.replace(cache, layers=(layer,))
            path = jnp.stack([jnp.zeros(rows, jnp.int32), 1 + (out[:, 0, 0, 0] > 0)], axis=1)
            cache = cache.commit(path, jnp.full((rows,), 2))
            return i + 1, cache, (out + jnp.arange(1, 1 + nodes)[:, None, None]).astype(q.dtype)

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, cache, q))[1]

    q = jnp.ones((rows, nodes, 4, dim), jnp.bfloat16)
    cache = dataclasses.replace(cache, lengths=jnp.arange(rows, dtype=jnp.int32))
    compiled = run.lower(cache, q).compile()
    text = compiled.as_text()
    assert "eaglejax.CacheWrite" in text
    assert "eaglejax.CacheAttention" in text
    shape = f"= bf16[{rows},2,{slots},{dim}]"
    assert not [line for line in text.splitlines() if shape in line and " copy(" in line]
    # Keys and values once for the loop at most (jax 0.11; 0.10 needs none), never once a round or a write.
    assert compiled.memory_analysis().temp_size_in_bytes < 2.2 * side
    done = run(cache, q)
    np.testing.assert_array_equal(done.lengths, np.arange(rows) + 10)
    k = np.asarray(done.layers[0].k.astype(jnp.float32))
    for row in range(rows):
        kept = k[row, 0, row : row + 10, 0]
        # The first round wrote ones; the later ones what their nodes, the first and the third, had become.
        np.testing.assert_array_equal(kept[:2], 1)
        assert (kept[3::2] > kept[2::2] + 1).all()
        assert not k[row, :, :row].any()


def test_vmap_and_derivatives():
    q, k, v, lengths, visible, positions, places = inputs()
    want = chosen(q, k, v, lengths, visible, positions, places, "cpu")

    def one(*row):
        return chosen(*(x[None] for x in row), "cpu")[0]

    stacked = jax.jit(jax.vmap(one))(q, k, v, lengths, visible, positions, places)
    np.testing.assert_array_equal(stacked, want)

    def loss(q, new, implementation):
        out, keys, _ = write_and_attend(
            q,
            new,
            new,
            k,
            v,
            lengths,
            visible,
            positions,
            slot_positions=places,
            scale=SCALE,
            attention=devices.Attention(implementation),
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(keys * jnp.cos(k))

    new = jnp.asarray(np.random.default_rng(7).normal(size=(B, N, HKV, D)), jnp.float32)
    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for ours, xlas in zip(grad(q, new, "cpu"), grad(q, new, "xla"), strict=True):
        assert np.abs(xlas).max() > 0.01
        np.testing.assert_allclose(ours, xlas, atol=1e-5)
    fresh = jnp.stack([new, -new]).transpose(0, 1, 3, 2, 4)
    mapped = jax.jit(jax.vmap(lambda fresh: write(k, fresh, lengths)))(fresh)
    np.testing.assert_array_equal(mapped[1], kernels.cache_write(k, fresh[1], lengths))


def step(q, new, k, v, lengths, visible, positions, places):
    """What a layer does, attention as the adapter chooses."""
    return write_and_attend(
        q, new, new, k, v, lengths, visible, positions, slot_positions=places, scale=SCALE
    )


def text(*, dim=D):
    """The program of a step, before XLA sees it."""
    q, k, v, *rest = inputs(dim)
    # Another function each time: jax would remember what was chosen for the last one.
    return jax.jit(lambda *arguments: step(*arguments)).lower(q, q[:, :, :HKV], k, v, *rest).as_text()


def test_programs_for_other_devices_hold_xlas_attention():
    q, k, v, *rest = inputs()
    exported = jax.export.export(jax.jit(step), platforms=["tpu"])(q, q[:, :, :HKV], k, v, *rest)
    assert "eaglejax.Cache" not in exported.mlir_module()
    assert "stablehlo.scatter" in exported.mlir_module()


@pytest.fixture
def choose_again():
    """The adapter is chosen anew, in the test and after it."""
    devices.current.cache_clear()
    yield
    devices.current.cache_clear()


def test_what_the_adapter_chooses(choose_again, monkeypatch):
    assert devices.current().attention == adapters.CPU
    assert "eaglejax.CacheAttention" in text()
    assert "eaglejax.CacheWrite" in text()
    # A head that the kernel does not take.
    assert "eaglejax.CacheAttention" not in text(dim=8)
    q, k, v, *rest = inputs(8)
    with pytest.raises(ConfigError, match="'cpu' kernel, which takes head sizes of a multiple of 16, not 8"):
        attend(
            q,
            k,
            v,
            rest[0],
            Seen(rest[1]),
            rest[2],
            slot_positions=rest[3],
            scale=1.0,
            implementation="cpu",
        )
    monkeypatch.setenv(native.LEVEL_VARIABLE, "portable")
    devices.current.cache_clear()
    jax.clear_caches()  # the write's program, which does not know that its level has changed
    assert devices.current().attention == devices.XLA
    assert "this processor's level is portable" in dict(devices.current().reasons)["attention"]
    assert "eaglejax.CacheAttention" not in text()
    assert "eaglejax.CacheWrite.portable" in text()
    with pytest.raises(ConfigError, match="'cpu' attention kernel cannot be made here"):
        adapters.check_runs(devices.current(), adapters.CPU)


@pytest.mark.parametrize("why", ["turned off", "several devices"])
def test_without_the_kernels_all_is_xlas(choose_again, monkeypatch, why):
    if why == "turned off":
        monkeypatch.setenv(native.OFF_VARIABLE, "1")
    else:
        monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert devices.current().attention == devices.XLA
    assert "eaglejax.Cache" not in text()


def test_without_a_compiler_it_is_said_once(choose_again, monkeypatch, caplog):
    def load(source, level):
        raise foreign.KernelError("no compiler at all")

    monkeypatch.setattr(native, "load", load)
    foreign._made.cache_clear()
    try:
        for _ in range(2):
            assert "eaglejax.Cache" not in text()
    finally:
        foreign._made.cache_clear()
    assert caplog.text.count("attention is left to XLA, which is slower on a CPU: no compiler at all") == 1
    assert caplog.text.count("writes into a cache are left to XLA") == 1
