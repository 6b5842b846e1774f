"""Writing Medusa heads: as their authors' code reads them, as vLLM does, and in the project's own form, which
alone has a place for what aligns heads to a rotated target and for a matrix that is borrowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.files import write_text
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.checkpoint.tables import candidates
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.names import TOKEN_MAP, rules
from eaglejax.drafts.medusa.files.read import KEY, KIND
from eaglejax.drafts.medusa.methods import FORM_NAMES
from eaglejax.drafts.medusa.model import Weights, param_table
from eaglejax.drafts.places import LONE_HEADS
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths

OWN = "eaglejax"
Tensors = dict[str, Pending]


def write_heads(
    out: Path,
    config: MedusaConfig,
    weights: Weights,
    ids: np.ndarray | None,
    *,
    to: str = OWN,
    target: Target | None = None,
    verifier: str | None = None,
) -> list[str]:
    """Write heads to the new folder ``out``; sentences on what was decided.

    ``ids`` [Vd]: target id of each draft id, or None. ``target``: gives the matrix to the vocabulary that the
    heads borrow and the form wants in the file. ``verifier``: its name, for the form that records it. Raises
    ConfigError for what the form cannot say and for a folder that is not empty.
    """
    if to not in FORM_NAMES:
        raise ConfigError(f"form {to!r} is not known; use one of {', '.join(FORM_NAMES)}")
    cannot = {
        "the map of a rotated target's state": to != OWN and (config.feature_map or config.basis is not None),
        "a reduced vocabulary": to == "medusa" and config.reduced,
        "a scale of the logits": to == "medusa" and config.logit_scale != 1,
        "a softcap of the logits": to != OWN and config.softcap is not None,
    }
    wrong = [text for text, has in cannot.items() if has]
    if wrong:
        raise ConfigError(f"the {to} form cannot hold these heads: it has no place for {', '.join(wrong)}")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name a new folder")
    tensors, notes = _tensors(config, weights, ids, to, target)
    lone = to == "medusa"
    document = _document(config, to, verifier)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / (LONE_HEADS[0] if lone else "model.safetensors"), tensors, {"format": "pt"})
    write_text(out / "config.json", json.dumps(document, indent=2) + "\n")
    return notes


def _tensors(
    config: MedusaConfig, weights: Weights, ids: np.ndarray | None, to: str, target: Target | None
) -> tuple[Tensors, list[str]]:
    names = rules(config, "medusa" if to == "medusa" else "vllm")
    out, notes, infos = Tensors(), [], leaf_paths(param_table(config))
    flat = dict(zip(infos, jax.tree.leaves(weights), strict=True))
    for leaf, value in flat.items():
        found = next(iter(candidates(leaf, infos[leaf], names)))
        stored = np.asarray(value)
        out[found.names[0]] = _pending(stored.T if found.layout.transposed else stored)
    outputs = [f"{k}.{config.layers}.weight" for k in range(config.heads)]
    if config.output == "target" and to != OWN:
        if target is None:
            raise ConfigError(
                f"the {to} form holds the matrix to the vocabulary, which these heads borrow; name the target"
            )
        matrix = _pending(np.asarray(head_matrix(target, ids)).T)
        out |= dict.fromkeys(outputs if to == "medusa" else ["lm_heads.0.weight"], matrix)
        notes.append("the target's matrix to the vocabulary was copied into the file")
    if config.output == "shared" and to == "medusa":
        out |= dict.fromkeys(outputs, out.pop("lm_heads.0.weight"))
        notes.append("the heads' one matrix to the vocabulary was written once for each")
    if to == "medusa" and not config.bias:
        # Their blocks have biases, always.
        for name in [name for name in out if name.endswith(".linear.weight")]:
            size, dtype = config.hidden_size, out[name].dtype
            out[name.replace("weight", "bias")] = _pending(np.zeros(size, dtype))
        notes.append("biases of zero were written, which these heads do not have")
    if ids is not None:
        out[TOKEN_MAP] = _pending(np.asarray(ids, np.int64))
    return out, notes


def _pending(value: Any) -> Pending:
    return Pending(tuple(value.shape), np.dtype(value.dtype), lambda: np.ascontiguousarray(value))


def _document(config: MedusaConfig, to: str, verifier: str | None) -> Mapping[str, Any]:
    if to == "medusa":
        return {
            "base_model_name_or_path": verifier,
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.layers,
        }
    document = {
        "architectures": ["MedusaModel"],
        "model_type": KIND,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "original_lm_head": config.output != "each",
        "medusa_fc_bias": config.bias,
        "logit_scale": config.logit_scale,
    }
    if to == OWN:
        block = {"kind": KIND, "output": config.output, "feature_map": config.feature_map}
        own = {"basis": config.basis, "softcap": None if config.output == "target" else config.softcap}
        document[KEY] = block | {name: value for name, value in own.items() if value is not None}
    return document
