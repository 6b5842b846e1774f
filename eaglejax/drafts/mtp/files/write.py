"""Writing MTP modules: in the published layouts, as their owners' code reads them, and in the project's own
form, which holds modules with any kind of layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.files import write_text
from eaglejax.checkpoint.hf import MARKER as KEY
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.checkpoint.tables import Layout, Rule, candidates
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.layouts import LAYOUTS, OWN, Naming
from eaglejax.drafts.mtp.files.load import fit, read_weights
from eaglejax.drafts.mtp.files.read import KIND, MtpFile
from eaglejax.drafts.mtp.model import Weights, param_table
from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths

Tensors = dict[str, Pending]


def write_file(
    file: MtpFile, out: Path, *, to: str, target: Target | None, verifier: str | None
) -> list[str]:
    """Write read modules to the new folder ``out``; sentences on what was decided.

    Between published layouts tensors keep their values, dtypes and names within the layer; from and to the
    own form the kind of layer must be known, and so the ``target``. Raises ConfigError.
    """
    if OWN not in (to, file.layout):
        tensors, notes = _renamed(file, to, target)
        return _write(out, tensors, to, _block(file.recycle, file.basis), file.raw, target, verifier, notes)
    if target is None:
        raise ConfigError(
            f"the {OWN} form names weights by the kind of layer that the modules have; name the target"
        )
    config, assignments = fit(file, target.config)
    dtype = file.store.dtype(next(iter(a.names[0] for a in assignments if a.leaf == "modules.0.fc")))
    weights = read_weights(file, config, assignments, dtype)
    return write_weights(out, config, weights, to=to, target=target, source=file.raw, verifier=verifier)


def write_weights(
    out: Path,
    config: MtpConfig,
    weights: Weights,
    *,
    to: str = OWN,
    target: Target | None = None,
    source: Mapping[str, Any] | None = None,
    verifier: str | None = None,
) -> list[str]:
    """Write a draft's ``weights`` to the new folder ``out``; a published layout needs the ``target``. Raises
    ConfigError for what it cannot say."""
    flat = dict(zip(leaf_paths(param_table(config)), jax.tree.leaves(weights), strict=True))
    block = _block(config.recycle, config.basis)
    if to == OWN:
        tensors = {leaf: _pending(value) for leaf, value in flat.items()}
        block |= {"modules": config.modules}
        return _write(out, tensors, to, block, source or {}, target, verifier, [])
    if target is None:
        raise ConfigError(f"the {to} form names a layer's weights as the target does; name the target")
    tensors = _stored(LAYOUTS[to], _numbers(to, config.modules, {}, target), config, flat, target.config, to)
    return _write(out, tensors, to, block, source or {}, target, verifier, [])


def _block(recycle: str, basis: str | None) -> dict[str, Any]:
    return {"kind": KIND, "recycle": recycle} | ({} if basis is None else {"basis": basis})


def _pending(value: Any) -> Pending:
    return Pending(tuple(value.shape), np.dtype(value.dtype), lambda: np.asarray(value))


def _write(
    out: Path,
    tensors: Tensors,
    to: str,
    block: dict[str, Any],
    source: Mapping[str, Any],
    target: Target | None,
    verifier: str | None,
    notes: list[str],
) -> list[str]:
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name a new folder")
    layer = source.get("transformer_layer_config")
    flat = {**source, **(layer if isinstance(layer, Mapping) else {})}
    if target is not None:
        model = target.config
        flat |= {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
        flat |= {"num_hidden_layers": model.num_layers}
    shape = {k: flat[k] for k in ("hidden_size", "vocab_size", "num_hidden_layers") if k in flat}
    document: dict[str, Any] = {"model_type": KIND, **shape, KEY: block}
    if to in ("deepseek", "qwen", "mimo"):
        naming = LAYOUTS[to]
        numbers = {"num_nextn_predict_layers": len(_fcs(tensors, naming))}
        if "fc" in naming.shared:
            numbers = {"mtp_num_hidden_layers": len(naming.found(tensors))}
        document |= {"architectures": [naming.architecture], "model_type": naming.model_type, **numbers}
    elif to == "speculators":
        kept = flat if not isinstance(layer, Mapping) else layer
        inner = {k: v for k, v in kept.items() if k not in (KEY, "architectures")}
        document |= {
            "architectures": [LAYOUTS[to].architecture],
            "speculators_model_type": "mtp",
            "speculators_version": source.get("speculators_version") or "0.4.0",
            "num_nextn_predict_layers": len(_fcs(tensors, LAYOUTS[to])),
            "transformer_layer_config": {**inner, **shape},
            "speculators_config": {
                "algorithm": "mtp",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
        }
        del document["model_type"]
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", tensors, {"format": "pt"})
    write_text(out / "config.json", json.dumps(document, indent=2) + "\n")
    return notes


def _fcs(tensors: Mapping[str, Any], naming: Naming) -> tuple[int, ...]:
    return naming.found([name.removeprefix("model.") for name in tensors])


def _numbers(to: str, modules: int, raw: Mapping[str, Any], target: Target | None) -> Sequence[int]:
    """How a layout counts the modules: DeepSeek's go on behind the model's layers."""
    layers = target.config.num_layers if target is not None else raw.get("num_hidden_layers")
    first = layers if to == "deepseek" and isinstance(layers, int) else 0
    return range(first, first + modules)


def _in_model(to: str) -> str:
    """What stands before plain names in a layout's files."""
    return "model." if to in ("deepseek", "mimo") else ""


def _outer(to: str, name: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.")) else _in_model(to) + name


def _renamed(file: MtpFile, to: str, target: Target | None) -> tuple[Tensors, list[str]]:
    """The tensors of one published layout under the names of another."""
    old, new, store = file.naming, LAYOUTS[to], file.store
    numbers = _numbers(to, len(file.numbers), file.raw, target)
    several = len(file.numbers) > 1
    if several and set(new.shared) - set(old.shared) - ({"head"} if not _has_heads(file) else set()):
        raise ConfigError(f"the {to} form has one projection and one head for all modules; use another form")
    out: Tensors = {}
    for i, j in zip(file.numbers, numbers, strict=True):
        names = {leaf: name.replace("{i}", str(i)) for leaf, name in old.parts.items()}
        for leaf, name in names.items():
            if name not in store.names():
                continue
            turned = leaf == "fc" and old.swapped != new.swapped
            renamed = _outer(to, new.parts[leaf].replace("{i}", str(j)))
            out[renamed] = _copied(file, name, turned)
        before = old.layer.replace("{i}", str(i))
        parts = {*names.values(), *file.embeddings}
        for name in store.names():
            if name.startswith(before) and name not in parts:
                renamed = new.layer.replace("{i}", str(j)) + name.removeprefix(before)
                out[_outer(to, renamed)] = _copied(file, name, False)
    if file.embeddings:
        out[_outer(to, "embed_tokens.weight")] = _copied(file, file.embeddings[0], False)
    return out, []


def _has_heads(file: MtpFile) -> bool:
    return any(file.naming.parts["head"].replace("{i}", str(i)) in file.store.names() for i in file.numbers)


def _copied(file: MtpFile, name: str, turned: bool) -> Pending:
    store = file.store

    def make() -> np.ndarray:
        value = store.array(name)
        half = value.shape[-1] // 2
        return np.concatenate([value[..., half:], value[..., :half]], axis=-1) if turned else value

    return Pending(store.shape(name), store.dtype(name), make)


def _stored(
    naming: Naming,
    numbers: Sequence[int],
    config: MtpConfig,
    flat: Mapping[str, Any],
    target: ModelConfig,
    to: str,
) -> Tensors:
    """Weights under a layout's names, as its files keep them."""
    rules = naming.rules(target, numbers)
    if config.modules > 1 and naming.shared:
        raise ConfigError(f"the {to} form has one projection and one head for all modules; use {OWN}")
    if config.own_embedding:
        rules = [*rules, Rule("embed", "embed_tokens.weight")]
    infos, out = leaf_paths(param_table(config)), Tensors()
    for leaf, value in flat.items():
        if leaf.endswith(".head") and not config.own_head:
            continue
        found = next(iter(candidates(leaf, infos[leaf], rules)), None)
        if found is None or not _invertible(found.layout):
            raise ConfigError(f"the {to} form has no name for {leaf} as it is held here; use {OWN}")
        values = value if found.stacked else [value]
        for name, part in zip(found.names, values, strict=True):
            out[_outer(to, name)] = _pending(_inverse(np.asarray(part), found.layout))
    return out


def _invertible(layout: Layout) -> bool:
    plain = Layout(transposed=layout.transposed, rows=layout.rows)
    return all(
        getattr(layout, field.name) == getattr(plain, field.name) for field in dataclasses.fields(layout)
    )


def _inverse(value: np.ndarray, layout: Layout) -> np.ndarray:
    """A leaf as the file keeps it."""
    stored = value.T if layout.transposed else value
    if layout.rows is None:
        return np.ascontiguousarray(stored)
    # A layout's rows change places, whole or by halves: where each number goes is asked of the map itself.
    where = layout.rows(np.arange(stored.size).reshape(stored.shape)).reshape(-1)
    out = np.empty(stored.size, stored.dtype)
    out[where] = stored.reshape(-1)
    return out.reshape(stored.shape)
