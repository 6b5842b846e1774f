"""What the kernel tests share: devices that are not there, and compiling or lowering for them."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

TPU_TOPOLOGIES = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5p"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "v7x": ("tpu7x:2x2x1", "TPU7x"),
}


@functools.cache
def tpu_topology(generation: str):
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu-aot): nothing can compile for a TPU here")
    return topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[generation][0])


def compile_for_tpu(generation: str, function: Callable, *shapes: Any):
    """Compile for one chip of a generation; `shapes` are pytrees of ShapeDtypeStruct."""
    mesh = Mesh(np.array(tpu_topology(generation).devices[:1]), ("x",))
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        shapes,
    )
    with jax.sharding.use_abstract_mesh(abstract_tpu(generation)):
        return jax.jit(function).lower(*placed).compile()


def compile_for_tpus(generation: str, axes: dict[str, int], make_function: Callable, shapes: Any, specs: Any):
    """Compile over a mesh of chips: `make_function(mesh)` is jitted on `shapes` laid out by `specs`."""
    count = int(np.prod(list(axes.values())))
    mesh = Mesh(np.array(tpu_topology(generation).devices[:count]).reshape(tuple(axes.values())), tuple(axes))
    placed = jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )
    return jax.jit(make_function(mesh)).lower(*placed).compile()


def abstract_tpu(generation: str) -> AbstractMesh:
    # Some lowering rules ask which TPU they lower for; without this they ask the CPU.
    device = AbstractDevice(device_kind=TPU_TOPOLOGIES[generation][1], num_cores=1, platform="tpu")
    # One chip shards nothing, so its axis is automatic: newer jax makes mesh axes part of every array's type.
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def mosaic_gpu():
    """The module, or a skip: jax 0.10 cannot import it without absl-py, which it does not require."""
    return pytest.importorskip("jax.experimental.pallas.mosaic_gpu")


def gpu_simulator():
    if not hasattr(mosaic_gpu(), "InterpretGPUParams"):
        pytest.skip(f"jax {jax.__version__} does not simulate Mosaic GPU kernels; 0.12 does")
    return mosaic_gpu().InterpretGPUParams(detect_races=True)


def lower_for(platform: str, function: Callable, *shapes: Any) -> str:
    """StableHLO of the function exported for "tpu" or "cuda"."""
    if platform == "cuda":
        return export.export(jax.jit(function), platforms=["cuda"])(*shapes).mlir_module()
    with jax.sharding.use_abstract_mesh(abstract_tpu("v5e")):
        return export.export(jax.jit(function), platforms=["tpu"])(*shapes).mlir_module()


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
