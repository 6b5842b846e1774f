"""Narrow keys and values by themselves: codebooks, rotations, packed bits, what a vector comes back as."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import FORMATS, KVFormat, kv_format
from eaglejax.nn import kv_codec
from eaglejax.nn.codebooks import lloyd_max, rotation_blocks

NARROW = [name for name in FORMATS if not KVFormat(name).plain]
ROTATED = [name for name in NARROW if KVFormat(name).rotation]
SOME = ["int8", "fp8", "rotor4", "iso3", "turbo4"]


def beta_density(x: np.ndarray, dim: int) -> np.ndarray:
    """Of a coordinate of a random unit vector, not normalised."""
    return (1 - x**2) ** ((dim - 3) / 2)


@pytest.mark.parametrize("dim", [3, 8, 64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_levels_are_the_means_of_their_cells(dim: int, bits: int) -> None:
    """Both conditions of an optimal quantiser, by integrals of the density in x rather than in the angle."""
    levels = lloyd_max(dim, bits).astype(np.float64)
    assert (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    for low, high, level in zip(edges[:-1], edges[1:], levels, strict=True):
        x = low + (high - low) * (np.arange(20_000) + 0.5) / 20_000
        p = beta_density(x, dim)
        assert level == pytest.approx((x * p).sum() / p.sum(), abs=2e-6)


def test_levels_tend_to_max_s_table_for_a_gaussian() -> None:
    """Max (1960), Table I: 8 and 16 levels for variance 1."""
    got = {bits: lloyd_max(4096, bits)[1 << bits - 1 :] * 64.0 for bits in (3, 4)}
    np.testing.assert_allclose(got[3], [0.2451, 0.7560, 1.344, 2.152], rtol=2e-3)
    want = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    np.testing.assert_allclose(got[4], want, rtol=2e-3)


@pytest.mark.parametrize("kind", ["rotor", "iso", "turbo"])
@pytest.mark.parametrize("dim", [2, 3, 8, 13, 64])
def test_rotations_are_orthogonal_seeded_and_cover_all_coordinates(kind: str, dim: int) -> None:
    blocks = rotation_blocks(kind, dim, 5)
    assert sum(count * size for count, size, _ in (b.shape for b in blocks)) == dim
    sizes = {"rotor": 3, "iso": 4, "turbo": dim}
    for block in blocks:
        assert block.shape[1] <= sizes[kind]
        for matrix in block.astype(np.float64):
            np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-6)
            if len(matrix) in (3, 4) and kind != "turbo":
                assert np.linalg.det(matrix) == pytest.approx(1, abs=1e-5)
    other = rotation_blocks(kind, dim, 6)
    assert dim == 2 or any(not np.array_equal(a, b) for a, b in zip(blocks, other, strict=True))


def test_blocks_turn_every_direction_alike() -> None:
    """Uniform rotations take a fixed vector to a uniform one: mean 0, covariance 1 / m."""
    for kind, size in (("rotor", 3), ("iso", 4)):
        first = rotation_blocks(kind, 6000, 0)[0][:, :, 0]
        np.testing.assert_allclose(first.mean(0), 0, atol=0.05)
        np.testing.assert_allclose(first.T @ first / len(first), np.eye(size) / size, atol=0.03)


@pytest.mark.parametrize(("bits", "dim"), [(3, 2), (3, 7), (3, 10), (3, 64), (4, 7), (4, 8)])
def test_bits_are_packed_without_loss_and_without_room_to_spare(bits: int, dim: int) -> None:
    kv_form = KVFormat(f"turbo{bits}")
    codes = np.random.default_rng(dim).integers(0, 1 << bits, (5, dim)).astype(np.uint8)
    packed = jax.jit(kv_codec.pack, static_argnums=1)(codes, kv_form)
    assert packed.shape == (5, kv_form.width(dim))
    assert packed.dtype == jnp.uint8
    assert kv_form.width(dim) <= -(-dim * bits // 8) + 1
    assert dim % 8 or kv_form.width(dim) == dim * bits // 8
    back = jax.jit(kv_codec.unpack, static_argnums=(1, 2))(packed, kv_form, dim)
    np.testing.assert_array_equal(back, codes)


def test_looking_up_by_halves_is_looking_up() -> None:
    levels = np.linspace(-1, 1, 16, dtype=np.float32)
    codes = np.arange(16, dtype=np.uint8)
    got = jax.jit(lambda c: kv_codec.lookup(c, levels, jnp.float32))(codes)
    np.testing.assert_array_equal(got, levels)


def empty_side(kv_form, shape, channels, *, centred=False):
    """An empty side of a cache [B, Hkv, S, d], with the scales of its channels where the format has such."""
    side = pytree.zeros(kv_codec.table(kv_form, shape, "slots", centred=centred))
    return side if channels is None else dataclasses.replace(side, channels=channels)


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(
    kv_form: KVFormat, x: jax.Array, channels: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What vectors come back as, and the codes."""
    empty = empty_side(kv_form, x.shape, channels)
    assert isinstance(empty, kv_codec.PackedKV)
    packed = kv_codec.encode(empty, x, jnp.zeros(x.shape[0], jnp.int32))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), packed) == jax.tree.map(
        lambda a: (a.shape, a.dtype), empty
    )
    return kv_codec.decode(packed), packed.codes


def vectors(dim: int = 64, count: int = 400) -> np.ndarray:
    """Gaussian, of lengths over many orders of magnitude: [1, 2, count, dim]."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(-30, 30, (1, 2, count, 1)))
    return (rng.standard_normal((1, 2, count, dim)) * lengths).astype(np.float32)


# Mean squared error a unit of energy: rounding to a grid of amax / 127, three bits of mantissa, and the
# distortion of the optimal 16 and 8 levels of a Gaussian (Max, 1960).
ERRORS = {"int8": 6e-5, "fp8": 8e-4, 4: 0.0098, 3: 0.0355}


@pytest.mark.parametrize("name", [n for n in NARROW if n != "int8-static"])
def test_vectors_come_back_within_the_error_of_their_bits(name: str) -> None:
    x, kv_form = vectors(), KVFormat(name)
    back, _ = there_and_back(kv_form, x, None)
    error = ((np.asarray(back) - x) ** 2).sum(-1) / (x**2).sum(-1)
    most = ERRORS[kv_form.bits if kv_form.rotation else name]
    assert 0.3 * most < error.mean() < most
    assert error.max() < 8 * most


def test_a_full_rotation_alone_spreads_a_channel_that_outweighs_the_rest() -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 300, 64)).astype(np.float32)
    x[..., 5] *= 30
    errors = {}
    for name in ROTATED:
        back, _ = there_and_back(KVFormat(name), x, None)
        errors[name] = float(((np.asarray(back) - x) ** 2).sum() / (x**2).sum())
    assert errors["turbo4"] < 0.012
    assert errors["turbo3"] < 0.042
    for name in ("rotor4", "iso4", "rotor3", "iso3"):
        assert errors[name] > 3 * errors[f"turbo{name[-1]}"]


def test_static_scales_are_a_channel_s_own_and_cut_what_lies_beyond() -> None:
    x = np.zeros((1, 1, 2, 2), np.float32)
    x[0, 0, 0] = [1.0, -1000.0]
    x[0, 0, 1] = [2.0, 5.0]
    channels = jnp.asarray([[1 / 127, 10.0]], jnp.float32)
    back, codes = there_and_back(KVFormat("int8-static"), jnp.asarray(x), channels)
    np.testing.assert_array_equal(codes[0, 0], [[127, -100], [127, 0]])
    np.testing.assert_allclose(back[0, 0], [[1.0, -1000.0], [1.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_zeros_and_tiny_vectors_are_held(name: str) -> None:
    x = np.zeros((1, 1, 4, 8), np.float32)
    x[0, 0, 1, 3] = 1e-42  # a subnormal, which may become zero
    x[0, 0, 2] = 1e37
    x[0, 0, 3, 0] = -1.5
    back, _ = there_and_back(KVFormat(name), x, None)
    back = np.asarray(back)[0, 0]
    assert np.isfinite(back).all()
    np.testing.assert_array_equal(back[0], 0)
    assert np.abs(back[1]).max() <= 2e-42
    assert np.linalg.norm(back[2] / 1e37 - 1) < 0.6 * 8**0.5
    assert back[3, 0] < -0.3


@pytest.mark.parametrize("name", SOME)
def test_codes_of_a_token_depend_on_it_alone(name: str) -> None:
    """What law 3 and equality with sequential decoding rest on: neighbours, their number, and slots."""
    x = vectors(dim=8, count=6)
    whole = np.asarray(there_and_back(KVFormat(name), x, None)[0])
    for i in range(6):
        alone = there_and_back(KVFormat(name), x[:, :, i : i + 1], None)[0]
        np.testing.assert_allclose(alone, whole[:, :, i : i + 1], rtol=1e-6)


def test_a_format_is_named_in_the_words_that_others_use() -> None:
    assert kv_format("fp8_e4m3") == kv_format(jnp.float8_e4m3fn) == KVFormat("fp8")
    assert kv_format(np.dtype("float32")) == kv_format(np.float32) == KVFormat("float32")
    assert kv_format(jnp.bfloat16).plain
    assert KVFormat("iso3", seed=7).describe() == {"format": "iso3", "bits": 3, "seed": 7}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: kv_format("int4"), "'int4' is not known.*rotor4"),
        (lambda: kv_format(np.int8), "'int8' or 'int8-static'"),
        (lambda: kv_format(3.5), "neither a name nor a dtype"),
        (lambda: KVFormat("int8", seed=3), "draws no rotation"),
        (lambda: KVFormat("turbo4", seed=-1), "seed -1"),
    ],
)
def test_formats_that_cannot_be_are_refused(make, match) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize("name", ["int8", "turbo3"])
def test_keys_relative_to_a_row_s_first_one_lose_nothing_to_what_all_share(name: str) -> None:
    """A common vector a hundred times as long costs no bit; the first key itself is held exactly."""
    kv_form, rng = KVFormat(name), np.random.default_rng(2)
    x = rng.standard_normal((2, 2, 65, 64)).astype(np.float32)
    shared = 100 * rng.standard_normal((2, 2, 1, 64)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def held(centred: bool, keys: jax.Array) -> jax.Array:
        cache = empty_side(kv_form, keys.shape, None, centred=centred)
        assert isinstance(cache, kv_codec.PackedKV)
        return kv_codec.decode(kv_codec.encode(cache, keys, jnp.zeros(2, jnp.int32)))

    errors = []
    for keys in (x, x + shared):
        back = np.asarray(held(True, keys))
        np.testing.assert_allclose(back[:, :, 0], keys[:, :, 0], rtol=1e-6)
        errors.append(((back - keys)[:, :, 1:] ** 2).mean())
    # What is left of the difference is rounding of float32.
    assert errors[1] == pytest.approx(errors[0], rel=0.02)
    assert ((np.asarray(held(False, x + shared)) - x - shared) ** 2).mean() > 30 * errors[1]
