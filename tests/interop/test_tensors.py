"""Arrays and trees between jax and torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from eaglejax.errors import ConfigError
from eaglejax.interop.backends import arrays
from eaglejax.interop.backends.torch_cpu import TorchCPU
from eaglejax.interop.convert.tensors import cache_to_jax, cache_to_torch, to_jax, to_torch, tree_to_torch
from eaglejax.interop.models.layers import packed_linear
from eaglejax.nn.kv import init_cache

VALUES = np.asarray([[0.0, 1.5, -2.0, 96.0], [-0.25, 3.0, 0.5, -8.0]], np.float32)


@pytest.mark.parametrize("name", [n for n in arrays.DTYPES if n != "int64"])
def test_every_dtype_crosses_both_ways_to_the_bit(name):
    x = jnp.asarray(VALUES).astype(name)
    tensor = to_torch(x)
    assert tensor.dtype == arrays.DTYPES[name]
    assert np.array_equal(arrays.to_numpy(tensor).astype(np.float32), np.asarray(x).astype(np.float32))
    back = to_jax(tensor)
    assert back.dtype == x.dtype
    assert np.asarray(back).tobytes() == np.asarray(x).tobytes()
    assert torch.equal(arrays.to_tensor(np.asarray(x)).float(), tensor.float())


def test_nan_and_negative_zero_keep_their_bits():
    x = jnp.asarray([np.nan, -0.0, np.inf], jnp.bfloat16)
    assert np.asarray(to_jax(to_torch(x))).view(np.uint16).tolist() == np.asarray(x).view(np.uint16).tolist()


def test_int4_crosses_packed_two_rows_a_byte_as_the_kernels_pack():
    from kernels_pallas.quant_matmul import pack_int4

    values = np.arange(-8, 8).reshape(4, 4)
    x = jnp.asarray(values, jnp.int4)
    packed = to_torch(x)
    assert packed.dtype == torch.int8
    assert np.array_equal(packed.numpy(), np.asarray(pack_int4(jnp.asarray(values))))
    assert arrays.unpack_int4(packed).tolist() == values.tolist()
    back = to_jax(packed, "int4")
    assert back.dtype == jnp.int4
    assert np.asarray(back).astype(int).tolist() == values.tolist()
    with pytest.raises(ConfigError, match="packed in pairs"):
        to_torch(jnp.zeros((3, 2), jnp.int4))


def test_weights_share_the_hosts_memory_and_copies_do_not():
    x = jnp.asarray(VALUES)
    assert to_torch(x).data_ptr() == x.unsafe_buffer_pointer()
    copied = to_torch(x, copy=True)
    copied += 1
    assert np.array_equal(np.asarray(x), VALUES)
    tensor = torch.ones(3)
    array = to_jax(tensor)
    tensor += 1
    assert array.tolist() == [1, 1, 1]


def test_dtypes_and_devices_that_do_not_cross_are_named():
    with pytest.raises(ConfigError, match="uint4"):
        to_torch(jnp.zeros(2, jnp.uint4))
    with pytest.raises(ConfigError, match="complex64"):
        to_jax(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"'npu:3' here; import torch_npu first"):
        to_torch(jnp.zeros(2), "npu:3")
    with pytest.raises(ConfigError, match="'warp'"):
        arrays.torch_device("warp")
    with pytest.raises(ConfigError, match="float8_e4m3b11"):
        arrays.to_tensor(np.zeros(2, ml_dtypes.float8_e4m3b11fnuz))


def test_trees_keep_their_form_and_unknown_leaves_are_refused():
    tree = {"layers": [{"q": jnp.ones((2, 3))}], "pair": (jnp.zeros(1), None)}
    got = tree_to_torch(tree)
    assert got["layers"][0]["q"].shape == (2, 3)
    assert got["pair"][1] is None
    with pytest.raises(ConfigError, match="leaf of type Odd has no torch counterpart"):
        tree_to_torch({"x": Odd()})


class Odd:
    """No array."""


def test_caches_cross_as_copies_and_narrow_formats_are_refused():
    cache = init_cache(layers=2, batch=1, capacity=4, kv_heads=1, head_dim=2, kv_form="bfloat16")
    held = cache_to_torch(cache)
    held.k[0] += 1
    assert float(jnp.abs(cache.layers[0].k).max()) == 0
    back = cache_to_jax(held)
    assert back.layers[0].k.dtype == jnp.bfloat16
    assert float(back.layers[0].k.min()) == 1
    narrow = init_cache(layers=1, batch=1, capacity=4, kv_heads=1, head_dim=2, kv_form="int8")
    with pytest.raises(ConfigError, match="PackedKV does not cross"):
        cache_to_torch(narrow)


def test_an_array_spread_over_devices_is_gathered_on_the_host():
    x = jax.device_put(jnp.arange(4.0), jax.devices("cpu")[0])
    assert to_torch(x).tolist() == [0, 1, 2, 3]


def test_packed_tensors_refuse_what_they_cannot_mean():
    values, scale = torch.zeros(4, 2, dtype=torch.int8), torch.ones(2)
    for changes, text in (
        ({"bits": 3}, "3 bits"),
        ({"values": values.float()}, "int8"),
        ({"activation": "weekly"}, "'weekly'"),
        ({"activation": "static"}, "need input_scale"),
    ):
        fields = {"values": values, "scale": scale, "bits": 8, "activation": "dynamic", **changes}
        with pytest.raises(ConfigError, match=text):
            arrays.PackedTensor(**fields)


@pytest.mark.parametrize("static", [{}, {"input_scale": 0.1}, {"input_scale": 0.1, "input_offset": 3.0}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_stays_so_and_stays_alone(static, bad):
    """As in ``quant.array``: integers have no NaN, the scale of a row has."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 9, (4, 2), generator=generator).to(torch.int8)
    fields = {name: torch.tensor(value) for name, value in static.items()}
    kind = "static" if static else "dynamic"
    w = arrays.PackedTensor(values, torch.ones(2), bits=8, activation=kind, **fields)
    x = torch.randn((3, 4), generator=generator)
    broken = x.clone()
    broken[1, 2] = bad
    want, got = (packed_linear(TorchCPU(), one, w, torch.float32) for one in (x, broken))
    assert not torch.isfinite(got[1]).any()
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]], rtol=0, atol=0)
