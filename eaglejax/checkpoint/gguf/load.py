"""GGUF models: name tables, and the converted copy that makes later loads quick.

The first load of a file dequantises it into the layout of the decoder and keeps the result beside its
configuration and tokenizer under ``<cache>/converted/<key>/``; a later load maps that file and copies
nothing. The key is a hash of the file's size, modification time and first and last mebibyte, and of
``_LAYOUT_VERSION``: cheap, and any real edit of a GGUF file changes one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from jax.sharding import Mesh

from eaglejax.checkpoint.files import cache_dir, progress, read_json
from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile, part_paths
from eaglejax.checkpoint.gguf.tokenizer import tokenizer_from_metadata
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.checkpoint.tables import (
    COPY,
    MINUS_ONE,
    TRANSPOSE,
    Layout,
    Rule,
    check_layers,
    materialize,
    placement,
    plan,
)
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import CheckpointError
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.pytree import leaf_paths, unflatten

_LAYOUT_VERSION = 1
"""Raise it when the converted file's layout or meaning changes."""

_LAYER = "layers.{l}."


def _rules(norm: Layout, head_rows: Mapping[str, Layout]) -> list[Rule]:
    """Name table of an architecture; ``norm`` undoes an offset, ``head_rows`` a permutation of q and k."""
    blk = "blk.{l}."
    return [
        Rule("embed", "token_embd.weight", COPY),
        Rule("norm", "output_norm.weight", norm),
        Rule("head", "output.weight", TRANSPOSE),
        Rule(_LAYER + "attn_norm", blk + "attn_norm.weight", norm),
        *(Rule(_LAYER + x, f"{blk}attn_{x}.weight", head_rows[x]) for x in "qk"),
        *(Rule(f"{_LAYER}{x}_bias", f"{blk}attn_{x}.bias", head_rows[x + "_bias"]) for x in "qk"),
        Rule(_LAYER + "v", blk + "attn_v.weight", TRANSPOSE),
        Rule(_LAYER + "v_bias", blk + "attn_v.bias", COPY),
        Rule(_LAYER + "o", blk + "attn_output.weight", TRANSPOSE),
        Rule(_LAYER + "o_bias", blk + "attn_output.bias", COPY),
        *(Rule(f"{_LAYER}{x}_norm", f"{blk}attn_{x}_norm.weight", norm) for x in "qk"),
        Rule(_LAYER + "post_attn_norm", blk + "post_attention_norm.weight", norm),
        Rule(_LAYER + "mlp_norm", blk + "ffn_norm.weight", norm),
        Rule(_LAYER + "post_mlp_norm", blk + "post_ffw_norm.weight", norm),
        *(Rule(_LAYER + x, f"{blk}ffn_{x}.weight", TRANSPOSE) for x in ("gate", "up", "down")),
        Rule(_LAYER + "router", blk + "ffn_gate_inp.weight", TRANSPOSE),
        # Experts in one tensor, or (older files) one tensor each.
        *(
            Rule(f"{_LAYER}experts.{x}", f"{blk}ffn_{x}_exps.weight", TRANSPOSE)
            for x in ("gate", "up", "down")
        ),
        *(
            Rule(f"{_LAYER}experts.{x}", f"{blk}ffn_{x}.{{e}}.weight", TRANSPOSE)
            for x in ("gate", "up", "down")
        ),
    ]


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the row order of q and k in ``llama`` files, which pairs the two halves of a rotary dimension.

    ``rows`` [heads * head_dim, ...]; within a head the file keeps (0, d/2, 1, d/2 + 1, ...).
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def rules_for(architecture: str, config: ModelConfig) -> list[Rule]:
    """Name table of an architecture (one of ``metadata.ARCHITECTURES``)."""
    plain = {"q": TRANSPOSE, "k": TRANSPOSE, "q_bias": COPY, "k_bias": COPY}
    if architecture != "llama":
        return _rules(MINUS_ONE if architecture == "gemma3" else COPY, plain)
    d = config.head_dim
    matrix = Layout(transposed=True, rows=lambda rows: unpermute(rows, d))
    vector = Layout(rows=lambda rows: unpermute(rows.reshape(-1, 1), d).reshape(rows.shape))
    return _rules(COPY, {"q": matrix, "k": matrix, "q_bias": vector, "k_bias": vector})


IGNORABLE = (r"rope_freqs\.weight",)
"""Frequency divisors; they are read into the configuration."""


def fingerprint(path: Path) -> str:
    """The cache key of a file (see the module's text)."""
    digest = hashlib.sha256()
    parts = [part for part in part_paths(path) if part.is_file()] if path.is_file() else []
    for part in parts or [path]:
        stat = part.stat()
        digest.update(f"{_LAYOUT_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
        edge = 1 << 20
        with part.open("rb") as file:
            digest.update(file.read(edge))
            file.seek(max(0, stat.st_size - edge))
            digest.update(file.read(edge))
    return digest.hexdigest()[:32]


def load_gguf(
    path: Path, dtype: Any, *, context: int | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, Any, Tokenizer]:
    """(config, params, tokenizer) of a GGUF file, converted on the first call and mapped on later ones; with
    a ``mesh`` each device gets its part (see ``tables.placement``).

    Raises ``CheckpointError`` or ``ConfigError`` when the file is not understood or the cache cannot be
    written.
    """
    dtype = np.dtype(dtype)
    folder = converted_folder(path)
    weights = folder / f"{dtype.name}.safetensors"
    if not weights.is_file():
        file = GGUFFile(path)
        with keeping(path, folder):
            store_description(file, folder)
            # Another process may have made them while this one waited.
            if not weights.is_file():
                _store_weights(file, from_hf(read_json(folder / "config.json")), dtype, weights)
    config = from_hf(read_json(folder / "config.json"), context=context)
    return config, _map_params(weights, param_table(config, dtype), mesh), load_tokenizer(folder)


def converted_folder(path: Path) -> Path:
    """Where what a GGUF file was converted to is kept; it need not exist."""
    return cache_dir() / "converted" / fingerprint(path)


@contextlib.contextmanager
def keeping(path: Path, folder: Path) -> Iterator[None]:
    """Lets one process at a time write the converted form of ``path`` to ``folder``; the others wait. Says
    what to do when it cannot be written."""
    try:
        locks = folder.parent.with_name("locks")
        for needed in (locks, folder.parent):
            needed.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(locks / f"{folder.name}.lock"):
            yield
    except OSError as error:
        raise CheckpointError(
            f"cannot keep the converted weights of {path.name} in {folder}: {error}; "
            "set EAGLEJAX_CACHE to a folder with enough space"
        ) from error


def store_description(file: GGUFFile, folder: Path) -> None:
    """Write configuration and tokenizer, unless they are there; the folder appears complete or not at all."""
    if folder.is_dir():
        return
    config, tokenizer = config_from_metadata(file), tokenizer_from_metadata(file.metadata, file.path)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise CheckpointError(
            f"{file.path}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, its embedding only "
            f"{config['vocab_size']} rows"
        )
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        (temporary / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        tokenizer.save(temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _store_weights(file: GGUFFile, config: ModelConfig, dtype: np.dtype, weights: Path) -> None:
    rules = rules_for(file.metadata["general.architecture"], config)
    check_layers(file.names(), config.num_layers, str(file.path))
    assignments = plan(param_table(config, dtype), rules, file, where=str(file.path), ignorable=IGNORABLE)
    with progress(f"converting {file.path.name} (first time only)", len(assignments)) as advance:

        def make(assignment: Any) -> np.ndarray:
            value = materialize(assignment, file)
            advance()
            return value

        arrays = {
            a.leaf: Pending(a.info.shape, dtype, lambda a=a: make(a))  # type: ignore[misc]
            for a in assignments
        }
        write_safetensors(weights, arrays, {"source": file.path.name})


def _map_params(weights: Path, table: Any, mesh: Mesh | None) -> Any:
    """Params as arrays over the mapped file."""
    file = SafetensorsFile([weights])
    paths = leaf_paths(table)
    if set(file.names()) != set(paths):
        raise CheckpointError(f"{weights} does not hold this model; delete it, and it will be made again")
    leaves, place = {}, placement(table, mesh, str(weights), mapped=True)
    for path, info in paths.items():
        if file.shape(path) != info.shape or file.dtype(path) != np.dtype(info.dtype):
            raise CheckpointError(
                f"{weights} holds another {path}; delete the file, and it will be made again"
            )
        leaves[path] = place(path, file.array(path))
    return unflatten(table, leaves)
