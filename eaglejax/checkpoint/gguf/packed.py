"""GGUF weights in narrow forms, without expanding them to floats for good.

What is kept exactly, with ``Plan.keep`` (``quant="keep"`` or ``"keep-a8"``): tensors of every block type that
``kernels_pallas.block_matmul.FORMS`` lists, as ``BlockArray``, whose ``dequantize`` gives the file's numbers
bit for bit. Their bytes are put in the order in which products read them, once, into a file beside the
configuration and the tokenizer (``load.converted_folder``), which later loads map. That holds for embedding
and head too, excluded by the plan or not, as nothing of them is lost; of routers and whatever else a plan
excludes the activations are not rounded. A glob of the user's own keeps a weight float all the same.

What is requantised: every other weight that the plan has a scheme for (F16 and F32, and block types that no
form holds), from the file's numbers in f32, which adds the new scheme's rounding to the file's. One tensor is
held in f32 at a time.

All else (norms, biases, excluded weights of other types) is expanded to the target's dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.files import progress, read_json
from eaglejax.checkpoint.gguf.blocks import fields_of, form_of
from eaglejax.checkpoint.gguf.load import IGNORABLE, converted_folder, keeping, rules_for, store_description
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.checkpoint.tables import Assignment, aligned_empty, check_layers, materialize, plan
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.models.memory import require_free
from eaglejax.pytree import unflatten
from eaglejax.quant.blocks import BlockArray
from eaglejax.quant.calibrate import weight_paths
from eaglejax.quant.quantize import Packer
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, Plan, matches
from kernels_pallas.block_matmul import TILE, Form, pack

_VERSION = 1
"""Raise it when ``kernels_pallas.block_matmul.forms`` lays blocks out in another way."""

_CHUNK_ROWS = 4096
"""Of a tensor that are taken apart at a time; whole tiles."""


def load_packed(
    path: Path, dtype: Any, quant: Plan, *, context: int | None = None
) -> tuple[ModelConfig, Any, Tokenizer]:
    """(config, params with ``BlockArray`` and ``QuantArray`` leaves, tokenizer) of a GGUF file; see the
    module's text.

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
    require_free(
        f"the model in {path}",
        sum(file.tensors[name].nbytes for assignment in assignments for name in assignment.names),
        "take a scheme of fewer bits",
    )
    maker = _Maker(file, config, quant, weight_paths(config, table))
    kept = {a.leaf: form for a in assignments if quant.keep and (form := maker.form(a)) is not None}
    blocks = _blocks(file, folder, [a for a in assignments if a.leaf in kept]) if kept else None
    leaves: dict[str, Any] = {}
    with progress(f"quantising {path.name}", len(assignments)) as advance:
        for assignment in assignments:
            form = kept.get(assignment.leaf)
            if blocks is None or form is None:
                leaves[assignment.leaf] = maker.leaf(assignment)
            else:
                leaves[assignment.leaf] = maker.kept(assignment, form, blocks)
            advance()
    return config, unflatten(table, leaves), load_tokenizer(folder)


class _Maker:
    """Makes one leaf at a time."""

    def __init__(self, file: GGUFFile, config: ModelConfig, quant: Plan, paths: list[str]) -> None:
        self.file, self.plan, self.paths = file, quant, frozenset(paths)
        self.packer = Packer(config, quant, paths)
        self.own_globs = [glob for glob in quant.exclude if glob not in DEFAULT_EXCLUDE]

    def form(self, assignment: Assignment) -> Form | None:
        """The form in which a leaf is kept, None when it is not."""
        if assignment.leaf not in self.paths or matches(assignment.leaf, self.own_globs):
            return None
        kinds = {self.file.tensors[name].kind for name in assignment.names}
        return form_of(kinds.pop()) if len(kinds) == 1 else None

    def leaf(self, assignment: Assignment) -> Any:
        """A leaf that is not kept: requantised, or expanded."""
        path, dtype = assignment.leaf, assignment.info.dtype
        if self.packer.scheme_of(path) is None:
            return jax.device_put(materialize(assignment, self.file), may_alias=True)
        wide = dataclasses.replace(assignment.info, dtype=np.float32)
        values = materialize(dataclasses.replace(assignment, info=wide), self.file)
        return self.packer.pack(path, values, dtype=dtype)

    def kept(self, assignment: Assignment, form: Form, blocks: SafetensorsFile) -> BlockArray:
        path, (*lead, rows, columns) = assignment.leaf, assignment.info.shape
        table = path == "embed"
        rows, columns = (columns, rows) if table else (rows, columns)
        data = blocks.array(path) if path in blocks.names() else None
        shape = (*lead, form.tiles(columns), form.tile_bytes(rows))
        if data is None or data.shape != shape or data.dtype != np.uint8:
            raise CheckpointError(
                f"{blocks.paths[0]} does not hold this model; delete it, and it will be made again"
            )
        return BlockArray(
            data=jax.device_put(data, may_alias=True),
            form=form,
            rows=rows,
            outputs=columns,
            rounded=self._rounds_inputs(path),
            transposed=table,
            dtype=np.dtype(assignment.info.dtype),
        )

    def _rounds_inputs(self, path: str) -> bool:
        # Plans exclude embedding and head for the errors of their weights, and here they have none.
        exclude = tuple(glob for glob in self.plan.exclude if glob not in ("embed", "head"))
        scheme = dataclasses.replace(self.plan, exclude=exclude).scheme_of(path)
        return scheme is not None and scheme.activation is not None


def _blocks(file: GGUFFile, folder: Path, assignments: list[Assignment]) -> SafetensorsFile:
    """The blocks of a file's leaves as products read them: made on the first call, and mapped."""
    names = hashlib.sha256("\n".join(a.leaf for a in assignments).encode()).hexdigest()[:8]
    path = folder / f"blocks-{_VERSION}-{names}.safetensors"
    with keeping(file.path, folder):
        # Another process may have made them while this one waited.
        if not path.is_file():
            with progress(f"arranging {file.path.name} (first time only)", len(assignments)) as advance:

                def make(assignment: Assignment) -> np.ndarray:
                    value = _arranged(file, assignment)
                    advance()
                    return value

                arrays = {
                    a.leaf: Pending(_shape(file, a), np.dtype(np.uint8), lambda a=a: make(a))  # type: ignore[misc]
                    for a in assignments
                }
                write_safetensors(path, arrays, {"source": file.path.name})
    return SafetensorsFile([path])


def _shape(file: GGUFFile, assignment: Assignment) -> tuple[int, ...]:
    *lead, rows, columns = assignment.info.shape
    rows, columns = (rows, columns) if assignment.layout.transposed else (columns, rows)
    form = form_of(file.tensors[assignment.names[0]].kind)
    assert form is not None
    return (*lead, form.tiles(columns), form.tile_bytes(rows))


def _arranged(file: GGUFFile, assignment: Assignment) -> np.ndarray:
    """The blocks of one leaf, uint8 of ``_shape``, a few rows at a time."""
    kind = file.tensors[assignment.names[0]].kind
    form = form_of(kind)
    assert form is not None
    out = aligned_empty(_shape(file, assignment), np.dtype(np.uint8))
    matrices = out.reshape(-1, *out.shape[-2:])
    per_name = len(matrices) // len(assignment.names)
    height = assignment.info.shape[-1 if assignment.layout.transposed else -2]
    step = height if assignment.layout.rows else _CHUNK_ROWS
    for number, matrix in enumerate(matrices):
        name, first = assignment.names[number // per_name], number % per_name * height
        for start in range(0, height, step):
            stop = min(start + step, height)
            raw = file.raw(name, first + start, first + stop)
            fields = fields_of(kind, assignment.layout.rows(raw) if assignment.layout.rows else raw)
            for scales in (fields.scale, fields.min):
                if scales is not None and not np.isfinite(scales).all():
                    raise CheckpointError(f"{file.path}: {name!r} has block scales that are not finite")
            matrix[start // TILE : -(-stop // TILE)] = pack(form, fields)
    return out
