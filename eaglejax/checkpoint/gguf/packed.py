"""GGUF weights as quantised arrays, without expanding them to floats for good.

What is kept exactly, with ``Plan.keep`` (``quant="keep"`` or ``"keep-a8"``): tensors of type Q8_0, as int8,
and Q4_0, as int4; both have blocks of 32 input rows with one f16 scale, which is a ``QuantArray`` with
groups of 32 and that scale in f32. ``dequantize`` then gives the file's numbers bit for bit. That holds for
embedding and head too, excluded by the plan or not, as nothing is lost; what the plan excludes takes its
activations in their float dtype. A glob of the user's own keeps a weight float all the same.

What is requantised: every other weight that the plan has a scheme for (Q5_0, Q4_K, Q6_K and the like, F16
and F32), from the file's numbers in f32, which adds the new scheme's rounding to the file's. One tensor is
held in f32 at a time.

All else (norms, biases, excluded weights of other types) is expanded to the target's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind

from eaglejax.checkpoint.files import progress, read_json
from eaglejax.checkpoint.gguf.load import IGNORABLE, converted_folder, keeping, rules_for, store_description
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.tables import Assignment, check_layers, materialize, plan
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.pytree import unflatten
from eaglejax.quant.array import QuantArray
from eaglejax.quant.calibrate import weight_paths
from eaglejax.quant.quantize import Packer
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, Plan, matches

BLOCK = 32
"""Values of a Q8_0 or Q4_0 block."""

EXACT = {Kind.Q8_0: 8, Kind.Q4_0: 4}
"""Types whose blocks are kept, with the bits of an integer."""


def load_packed(
    path: Path, dtype: Any, quant: Plan, *, context: int | None = None
) -> tuple[ModelConfig, Any, Tokenizer]:
    """(config, params with ``QuantArray`` leaves, tokenizer) of a GGUF file; see the module's text.

    ``dtype``: of what stays float, and of what the packed weights stand for. Raises ``CheckpointError`` or
    ``ConfigError`` when the file is not understood or the plan does not fit it.
    """
    if quant.needs_statistics:
        raise ConfigError(
            f"{quant.label} takes statistics of the layers' inputs: load the target without quant, then "
            "quantize_target(target, plan, statistics=calibrate(target, prompts))"
        )
    file, folder = GGUFFile(path), converted_folder(path)
    with keeping(path, folder):
        store_description(file, folder)
    config = from_hf(read_json(folder / "config.json"), context=context)
    check_layers(file.names(), config.num_layers, str(path))
    table = param_table(config, np.dtype(dtype))
    rules = rules_for(file.metadata["general.architecture"], config)
    assignments = plan(table, rules, file, where=str(path), ignorable=IGNORABLE)
    maker = _Maker(file, config, quant, weight_paths(config, table))
    leaves = {}
    with progress(f"quantising {path.name}", len(assignments)) as advance:
        for assignment in assignments:
            leaves[assignment.leaf] = maker.leaf(assignment)
            advance()
    return config, unflatten(table, leaves), load_tokenizer(folder)


class _Maker:
    """Makes one leaf at a time."""

    def __init__(self, file: GGUFFile, config: ModelConfig, quant: Plan, paths: list[str]) -> None:
        self.file, self.plan, self.paths = file, quant, frozenset(paths)
        self.packer = Packer(config, quant, paths)
        self.own_globs = [glob for glob in quant.exclude if glob not in DEFAULT_EXCLUDE]

    def leaf(self, assignment: Assignment) -> Any:
        path, dtype = assignment.leaf, assignment.info.dtype
        bits = self._exact_bits(assignment)
        if bits is not None:
            return self._keep(assignment, bits)
        if self.packer.scheme_of(path) is None:
            return jax.device_put(materialize(assignment, self.file), may_alias=True)
        wide = dataclasses.replace(assignment.info, dtype=np.float32)
        values = materialize(dataclasses.replace(assignment, info=wide), self.file)
        return self.packer.pack(path, values, dtype=dtype)

    def _exact_bits(self, assignment: Assignment) -> int | None:
        """Bits of the integers that are kept of a leaf, None when it has none to keep."""
        if (
            not self.plan.keep
            or assignment.leaf not in self.paths
            or matches(assignment.leaf, self.own_globs)
        ):
            return None
        kinds = {self.file.tensors[name].kind for name in assignment.names}
        return EXACT.get(kinds.pop()) if len(kinds) == 1 else None

    def _keep(self, assignment: Assignment, bits: int) -> QuantArray:
        scheme = self.packer.scheme_of(assignment.leaf)
        *lead, a, b = assignment.info.shape
        table = assignment.leaf == "embed"
        rows, columns = (b, a) if table else (a, b)
        layout = dataclasses.replace(assignment.layout, transposed=True)

        def read(store: Any, height: int, dtype: Any) -> np.ndarray:
            info = dataclasses.replace(assignment.info, shape=(*lead, height, columns), dtype=dtype)
            return materialize(dataclasses.replace(assignment, info=info, layout=layout), store)

        values = read(_Integers(self.file), rows, np.int8)
        scale = read(_Scales(self.file), rows // BLOCK, np.float32)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"{self.file.path}: {assignment.names[0]!r} has block scales that are not finite"
            )
        return QuantArray(
            values=_pack(values) if bits == 4 else jax.device_put(values, may_alias=True),
            scale=jax.device_put(scale, may_alias=True),
            bits=bits,
            activation=None if scheme is None else scheme.activation,
            transposed=table,
            dtype=np.dtype(assignment.info.dtype),
        )


def _pack(values: np.ndarray) -> jax.Array:
    from kernels_pallas.quant_matmul import pack_int4

    return jax.jit(pack_int4)(jnp.asarray(values))


class _Integers:
    """The integers of a file's Q8_0 and Q4_0 tensors, as a store of int8 rows."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def names(self) -> Collection[str]:
        return self.file.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.shape(name)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        blocks = self._blocks(name, start, stop)
        if self.file.tensors[name].kind is Kind.Q8_0:
            return blocks[..., 2:].view(np.int8).reshape(stop - start, -1)
        # The low nibbles are the first half of a block, the high ones the second; all are 8 too large.
        nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
        return (nibbles.view(np.int8) - np.int8(8)).reshape(stop - start, -1)

    def _blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """uint8 [rows, blocks, bytes a block]: an f16 scale, then the integers."""
        raw = self.file.raw(name, start, stop)
        return raw.reshape(stop - start, self.file.shape(name)[-1] // BLOCK, -1)


class _Scales(_Integers):
    """The scales of the same blocks, as a store of f32 rows."""

    def shape(self, name: str) -> tuple[int, ...]:
        *lead, width = self.file.shape(name)
        return (*lead, width // BLOCK)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        scales = np.ascontiguousarray(self._blocks(name, start, stop)[..., :2]).view("<f2")
        return scales[..., 0].astype(np.float32)
