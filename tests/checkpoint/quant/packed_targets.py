"""Tiny targets of every family with random quantised weights, and their files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from eaglejax.checkpoint.quantized.parts import with_offset_sums
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.models.target import Target
from eaglejax.nn.cache import CacheScales
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput
from eaglejax.rotation.basis import Basis
from kernels_pallas.quant_matmul import pack_int4

COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
}
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class How:
    """Bits, activation, group of a scheme; ``offset``: static activations have one."""

    bits: int = 8
    activation: str | None = "dynamic"
    group: int | None = None
    offset: bool = False


SCHEMES = {
    "w8a8": How(),
    "w8a8-g16": How(group=16),
    "w8a8-static": How(activation="static"),
    "w8a8-static-offset": How(activation="static", offset=True),
    "w4a8": How(bits=4),
    "w4a8-g8": How(bits=4, group=8),
    "w4a16": How(bits=4, activation=None),
    "w4a16-g16": How(bits=4, activation=None, group=16),
    "w8a16": How(activation=None),
}


def raw_config(family):
    return {"model_type": family, **COMMON, **FAMILIES[family]}


def quantised(rng, shape, how, *, dtype="float32", transposed=False):
    """A random QuantArray that stands for a matrix of ``shape``; every integer of its range occurs."""
    *stack, rows, out = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    low, high = (-8, 8) if how.bits == 4 else (-127, 128)
    values = jnp.asarray(rng.integers(low, high, (*stack, rows, out)), jnp.int8)
    groups = [] if how.group is None else [rows // how.group]
    scale = rng.uniform(1e-3, 2e-2, (*stack, *groups, out)).astype(np.float32)
    static = how.activation == "static"
    found = QuantArray(
        values=pack_int4(values) if how.bits == 4 else values,
        scale=jnp.asarray(scale),
        input_scale=jnp.float32(rng.uniform(0.01, 0.1)) if static else None,
        input_offset=jnp.float32(rng.integers(-20, 20)) if how.offset else None,
        bits=how.bits,
        activation=how.activation,
        transposed=transposed,
        dtype=np.dtype(dtype),
    )
    return with_offset_sums(found)


def make_target(family="qwen2", how=SCHEMES["w8a8"], *, dtype="float32", seed=0, scheme_of=None, **fields):
    """A target of random weights. ``scheme_of``: path -> How or None, instead of ``how`` for all matrices."""
    rng = np.random.default_rng(seed)
    config = from_hf(raw_config(family))
    choose = scheme_of or (lambda path: how if path.rpartition(".")[2] in MATRICES else None)
    leaves = {}
    for path, info in leaf_paths(param_table(config, np.dtype(dtype))).items():
        chosen = choose(path) if len(info.shape) > 1 else None
        if chosen is None:
            leaves[path] = jnp.asarray(rng.normal(0, 0.2, info.shape), info.dtype)
        else:
            leaves[path] = quantised(rng, info.shape, chosen, dtype=dtype, transposed=path == "embed")
    params = unflatten(param_table(config, np.dtype(dtype)), leaves)
    return Target(
        config=config, params=params, dtype=np.dtype(dtype), context=64, quantization="w8a8", **fields
    )


def rotation(size=32, seed=0):
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    return Basis(matrix.astype(np.float32), np.linspace(0.5, 2, size, dtype=np.float32))


def cache_scales(config, seed=0):
    rng = np.random.default_rng(seed)
    shape = (config.num_kv_heads, config.head_dim)

    def side():
        return tuple(
            jnp.asarray(rng.uniform(0.01, 0.1, shape), jnp.float32) for _ in range(config.num_layers)
        )

    return CacheScales(k=side(), v=side())


def wrap_down(target):
    """The target with every down projection behind an online Hadamard turn."""
    layers = [layer | {"down": HadamardInput(layer["down"])} for layer in target.params["layers"]]
    return dataclasses.replace(target, params=target.params | {"layers": layers})


def assert_same(got, want):
    """Bit for bit, structure and static fields included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder, change):
    """Rewrite a folder's single shard, and its index, after ``change`` of its dict of tensors."""
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, shard)
    (index,) = folder.glob("*.index.json")
    edit_json(index, lambda value: value.update(weight_map=dict.fromkeys(tensors, shard.name)))
