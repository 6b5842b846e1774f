"""Limits of a Hopper thread block, which neither lowering nor the simulator knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import mosaic_gpu
from test_quant_matmul import FORMS, serving_shapes
from test_ttt_attention import gradient, training_shapes

from kernels_pallas.hadamard import hadamard
from kernels_pallas.quant_matmul import quant_matmul
from kernels_pallas.tree_attention import tree_attention

GPU = {"implementation": "gpu", "interpret": False}


def rotate(size):
    return functools.partial(hadamard, **GPU), (jax.ShapeDtypeStruct((9, size), jnp.bfloat16),)


def multiply(form, rows):
    shapes = serving_shapes(FORMS[form], rows=rows)
    return lambda arguments: quant_matmul(**arguments, **GPU), (shapes,)


def train(dim):
    return functools.partial(gradient, implementation="gpu"), training_shapes(dim=dim)


def attend(dim, nodes, cache):
    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, words = array(1, 2, 1024, dim, dtype=cache), array(1, nodes, -(-nodes // 32), dtype="int32")
    return functools.partial(tree_attention, **GPU), (
        array(1, nodes, 8, dim),
        keys,
        keys,
        words,
        array(1, dtype="int32"),
    )


@pytest.mark.parametrize(
    "problem",
    [
        *(rotate(size) for size in (4096, 14336, 18944, 20480)),
        *(multiply(form, rows) for form in ("W8A8", "W4A16 grouped") for rows in (1, 64)),
        *(train(dim) for dim in (64, 128)),
        *(attend(dim, 64, cache) for dim in (64, 128, 192, 256) for cache in ("bfloat16", "float8_e4m3fn")),
    ],
)
def test_shared_memory_of_a_thread_block_suffices(problem, monkeypatch):
    plgpu = mosaic_gpu()
    from kernels_pallas.hopper import SHARED_BYTES

    used = []

    def kernel(body, *, out_type, scratch_types, **_):
        arrays = [s for s in scratch_types.values() if not isinstance(s, plgpu.Barrier)]
        used.append(sum(int(np.prod(s.shape)) * jnp.dtype(s.dtype).itemsize for s in arrays))
        return lambda *operands: jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out_type)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    function, shapes = problem
    jax.eval_shape(function, *shapes)
    assert used
    # A kilobyte is left for barriers and alignment.
    assert max(used) <= SHARED_BYTES - 1024
