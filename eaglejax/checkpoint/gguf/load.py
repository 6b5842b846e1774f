"""GGUF models: configuration from metadata, name tables, and the converted copy that makes later loads quick.

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

import jax
import numpy as np

from eaglejax.checkpoint.files import cache_dir, progress, read_json
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.gguf.tokenizer import tokenizer_from_metadata
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.checkpoint.tables import COPY, MINUS_ONE, TRANSPOSE, Layout, Rule, materialize, plan
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import CheckpointError
from eaglejax.models.config import ModelConfig, from_hf
from eaglejax.models.decoder import param_table
from eaglejax.pytree import leaf_paths, unflatten

_LAYOUT_VERSION = 1
"""Raise it when the converted file's layout or meaning changes."""

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
"""Values of ``general.architecture`` that are read."""

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
    """Name table of an architecture (one of ``ARCHITECTURES``)."""
    plain = {"q": TRANSPOSE, "k": TRANSPOSE, "q_bias": COPY, "k_bias": COPY}
    if architecture != "llama":
        return _rules(MINUS_ONE if architecture == "gemma3" else COPY, plain)
    d = config.head_dim
    matrix = Layout(transposed=True, rows=lambda rows: unpermute(rows, d))
    vector = Layout(rows=lambda rows: unpermute(rows.reshape(-1, 1), d).reshape(rows.shape))
    return _rules(COPY, {"q": matrix, "k": matrix, "q_bias": vector, "k_bias": vector})


IGNORABLE = (r"rope_freqs\.weight",)
"""Frequency divisors; they are read into the configuration."""

_UNREAD = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "expert_shared_count",
    "expert_weights_scale",
)
"""Settings that would change the arithmetic in a way the decoder does not know; a value other than 0 is
refused."""


class _Metadata:
    """Typed look-ups under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        for key in _UNREAD:
            if self.get(key):
                raise CheckpointError(
                    f"{file.path}: {self.architecture}.{key} = {self.get(key)} is not supported"
                )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers, which is not "
                    "supported"
                )
            value = value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no {self.architecture}.{key} in its metadata")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things, of which there is at least one."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} = {value!r} must be a whole number above 0"
            )
        return value


_MODEL_TYPES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}


def config_from_metadata(file: GGUFFile) -> dict[str, Any]:
    """What the file's ``config.json`` would say, as ``models.config.from_hf`` reads it.

    Raises ``CheckpointError`` for an architecture or setting that is not supported and for missing keys.
    """
    meta = _Metadata(file)
    if "token_embd.weight" not in file.names():
        raise CheckpointError(f"{file.path} lacks token_embd.weight: it holds no language model")
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {meta.architecture}.{key} = {meta.get(key)} differs from the head dimension "
                f"{head_dim}, "
                "which is not supported"
            )
    special = {k: file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos")}
    config: dict[str, Any] = {
        "model_type": _model_type(meta),
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.names(),
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
    }
    if config["model_type"] == "qwen3_moe":
        config |= {
            "num_experts": meta.count("expert_count"),
            "num_experts_per_tok": meta.count("expert_used_count"),
            "moe_intermediate_size": meta.count("expert_feed_forward_length"),
            # Files of sparse layers alone may leave the dense width out; no layer would use it.
            "intermediate_size": meta.get("feed_forward_length", meta.count("expert_feed_forward_length")),
            "norm_topk_prob": True,
        }
    else:
        config["intermediate_size"] = meta.count("feed_forward_length")
    if config["model_type"] == "mixtral":
        config |= {
            "num_local_experts": meta.count("expert_count"),
            "num_experts_per_tok": meta.count("expert_used_count"),
        }
    if meta.architecture == "llama":
        biased = "blk.0.attn_q.bias" in file.names()
        config |= {"attention_bias": biased, "sliding_window": meta.get("attention.sliding_window")}
    if meta.architecture == "gemma3":
        config |= _gemma3(meta, head_dim, hidden, heads)
    return config


def _model_type(meta: _Metadata) -> str:
    """``llama`` files hold Llama, Mistral and Mixtral, told apart by what they use."""
    if meta.architecture != "llama":
        return _MODEL_TYPES[meta.architecture]
    if meta.get("expert_count"):
        return "mixtral"
    return "mistral" if meta.get("attention.sliding_window") else "llama"


def _gemma3(meta: _Metadata, head_dim: int, hidden: int, heads: int) -> dict[str, Any]:
    layers = meta.count("block_count")
    pattern = meta.get("attention.sliding_window_pattern") or 6
    # One flag a layer, or the period at which a layer attends to everything.
    flags = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return {
        # The 27B model alone (62 layers) scales by the mean width of a head; the metadata do not say so.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags],
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _rope_scaling(meta: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """Rotary scaling in the terms of ``config.json``, None for plain rotary embeddings."""
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    if kind == "none" and meta.get("rope.scale_linear"):
        kind = "linear"
    file = meta.file
    if "rope_freqs.weight" in file.names():
        if kind not in ("none", "longrope"):
            raise CheckpointError(
                f"{file.path} has both rope_freqs.weight and {kind!r} rope scaling; one must go"
            )
        # Llama 3's scaling is stored as its outcome: a divisor for every frequency, whatever the length.
        divisors = file.rows("rope_freqs.weight", 0, 1).reshape(-1).astype(float).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": meta.count("context_length"),
        }
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or not factor:
        raise CheckpointError(
            f"{file.path}: rope scaling type {kind!r} with factor {factor} is not supported; linear and "
            "yarn are"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        strength = meta.get("rope.scaling.attn_factor", meta.get("rope.scaling.yarn_attn_factor", 1.0))
        scaling |= {
            "original_max_position_embeddings": meta.need("rope.scaling.original_context_length"),
            "beta_fast": meta.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.get("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": strength * (1.0 + 0.1 * float(np.log(factor))),
        }
    return scaling


def fingerprint(path: Path) -> str:
    """The cache key of a file (see the module's text)."""
    stat = path.stat()
    digest = hashlib.sha256(f"{_LAYOUT_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    edge = 1 << 20
    with path.open("rb") as file:
        digest.update(file.read(edge))
        file.seek(max(0, stat.st_size - edge))
        digest.update(file.read(edge))
    return digest.hexdigest()[:32]


def load_gguf(path: Path, dtype: Any, *, context: int | None = None) -> tuple[ModelConfig, Any, Tokenizer]:
    """(config, params, tokenizer) of a GGUF file, converted on the first call and mapped on later ones.

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
            _store_weights(file, from_hf(read_json(folder / "config.json")), dtype, weights)
    config = from_hf(read_json(folder / "config.json"), context=context)
    return config, _map_params(weights, param_table(config, dtype)), load_tokenizer(folder)


def converted_folder(path: Path) -> Path:
    """Where what a GGUF file was converted to is kept; it need not exist."""
    return cache_dir() / "converted" / fingerprint(path)


@contextlib.contextmanager
def keeping(path: Path, folder: Path) -> Iterator[None]:
    """Says what to do when the converted form of ``path`` cannot be written to ``folder``."""
    try:
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        (temporary / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        tokenizer.save(temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _store_weights(file: GGUFFile, config: ModelConfig, dtype: np.dtype, weights: Path) -> None:
    rules = rules_for(file.metadata["general.architecture"], config)
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


def _map_params(weights: Path, table: Any) -> Any:
    """Params as arrays over the mapped file."""
    file = SafetensorsFile([weights])
    paths = leaf_paths(table)
    if set(file.names()) != set(paths):
        raise CheckpointError(f"{weights} does not hold this model; delete it, and it will be made again")
    leaves = {}
    for path, info in paths.items():
        if file.shape(path) != info.shape or file.dtype(path) != np.dtype(info.dtype):
            raise CheckpointError(
                f"{weights} holds another {path}; delete the file, and it will be made again"
            )
        leaves[path] = jax.device_put(file.array(path), may_alias=True)
    return unflatten(table, leaves)
