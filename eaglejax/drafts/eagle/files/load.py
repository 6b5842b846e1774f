"""Loading an EAGLE draft for a target: ``load_draft``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.demo import DEMO_DRAFTS, demo_draft
from eaglejax.checkpoint.files import read_json, weight_files
from eaglejax.checkpoint.hf import STEM
from eaglejax.checkpoint.sources import resolve
from eaglejax.checkpoint.tables import Assignment, materialize, plan
from eaglejax.config import AuxConvention
from eaglejax.drafts.align import align_params, aligned
from eaglejax.drafts.base import Bound
from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.names import IGNORABLE, PICKLES, rules
from eaglejax.drafts.eagle.files.read import DraftFile, read_draft
from eaglejax.drafts.eagle.model import EagleParams, Weights, param_table
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.target import Target, weight_dtype
from eaglejax.pytree import unflatten
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import plain
from eaglejax.rotation.tables import check_rotation


def draft_folder(spec: str | os.PathLike[str]) -> Path:
    """The folder of a draft: the shipped one (``demo``), an existing one, or a Hub id (owner/name, optionally
    @revision), downloaded.

    Published drafts may be pickles (``pytorch_model.bin``), which are fetched when there is nothing else;
    they are read without being run. Raises CheckpointError.
    """
    if os.fspath(spec) in DEMO_DRAFTS:
        return demo_draft(os.fspath(spec))
    source = resolve(spec)
    if source.kind != "folder":
        raise CheckpointError(
            f"{spec} is a GGUF file; an EAGLE draft is a folder with config.json and its weights"
        )
    hub = not Path(source.spec).expanduser().is_dir()
    if hub and not weight_files(source.path, STEM, ".safetensors")[0]:
        _fetch_pickles(os.fspath(spec))
    return source.path


def _fetch_pickles(spec: str) -> None:
    """Download ``pytorch_model.bin`` of a Hub id, or the shards that its index names."""
    import huggingface_hub

    repo, _, revision = spec.partition("@")

    def fetch(name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision or None))

    single, index = PICKLES
    try:
        fetch(single)
    except (OSError, ValueError) as error:
        try:
            shards = read_json(fetch(index)).get("weight_map") or {}
            for name in sorted(set(shards.values())):
                fetch(name)
        except (OSError, ValueError):
            raise CheckpointError(
                f"{spec} holds no safetensors weights and its {single} cannot be fetched"
            ) from error


def draft_plan(file: DraftFile, dtype: Any) -> tuple[Weights, list[Assignment]]:
    """(parameter table, which tensors make which leaf). Raises CheckpointError for a missing or unexpected
    tensor."""
    table = param_table(file.config, dtype)
    unused = [re.escape(name) for name in file.unused]
    assignments = plan(
        table, rules(file.config.aux_norm), file.store, where=str(file.path), ignorable=(*IGNORABLE, *unused)
    )
    return table, assignments


def read_weights(file: DraftFile, dtype: Any) -> Weights:
    """The draft's own weights in ``dtype``; nothing is read unless everything is there."""
    table, assignments = draft_plan(file, dtype)
    return unflatten(table, {a.leaf: jnp.asarray(materialize(a, file.store)) for a in assignments})


def bind(config: EagleConfig, weights: Weights, target: Target, ids: np.ndarray | None = None) -> EagleParams:
    """Weights joined with what they borrow of ``target`` (the same arrays, not copies).

    ``ids`` [Vd]: target id of each draft id, strictly increasing; None when they are the same. With
    ``target_rows`` the Vd rows of the target's head are taken once, here: Vd * H numbers more in memory, in
    the target's dtype, which is what a shipped head would take.
    """
    if (ids is not None) != config.reduced:
        raise ConfigError("ids go with a reduced draft vocabulary, and a reduced draft vocabulary needs them")
    if ids is not None:
        known = np.asarray(ids)
        if known.shape != (config.draft_vocab_size,) or not np.all(np.diff(known) > 0):
            raise ConfigError(f"ids must be {config.draft_vocab_size} strictly increasing target ids")
        if known[0] < 0 or known[-1] >= config.vocab_size:
            raise ConfigError(
                f"ids run from {known[0]} to {known[-1]}; the target knows 0..{config.vocab_size - 1}"
            )
    head, tied = (None, False) if config.own_head else target_head(target, ids)
    return EagleParams(
        weights=weights,
        embed=None if config.own_embedding else target.params["embed"],
        head=head,
        ids=None if ids is None else jax.device_put(np.asarray(ids, np.int32)),
        tied=tied,
    )


def target_head(target: Target, ids: np.ndarray | None) -> tuple[Any, bool]:
    """(the target's head at ``ids``, whether it is [Vd, H], as a tied head is, instead of [H, Vd])."""
    tied = "head" not in target.params
    head = target.params["embed" if tied else "head"]
    if ids is None:
        return head, tied
    if isinstance(head, QuantArray):
        return head.columns(jnp.asarray(ids, jnp.int32)), tied
    return jnp.take(head, jnp.asarray(ids, jnp.int32), axis=0 if tied else 1), tied


def head_matrix(target: Target, ids: np.ndarray | None = None, dtype: Any = None) -> jax.Array:
    """The target's head at ``ids`` (None: all), tied, quantised or neither, as an array [H, Vd] in ``dtype``
    (None: its own)."""
    head, tied = target_head(target, ids)
    head = plain(head, dtype)
    return head.T if tied else head


def load_draft(
    spec: str | os.PathLike[str],
    target: Target,
    *,
    dtype: Any = None,
    method: Literal["auto", "eagle1", "eagle3"] = "auto",
    aux_convention: AuxConvention = "auto",
    aux: tuple[int, ...] | None = None,
    align: bool = False,
    **options: Any,
) -> Bound:
    """An EAGLE draft ready for ``generate(..., proposer=...)``.

    ``spec``: a folder or a Hub id, in any published form (see ``docs/eagle.md``). ``dtype``: of its weights
    (None: the target's). ``aux_convention``, ``aux``: see ``read_draft``. ``align``: the draft was made for
    the original of this rotated target; map what it reads (see ``docs/rotation.md``). ``options``: settings
    of ``Eagle`` (tree, sample, temperature, min_confidence, cache_dtype). Raises CheckpointError for a file
    that is not understood, MismatchError for a draft of another target or in another basis than it,
    ConfigError for options that cannot be.
    """
    file = read_draft(draft_folder(spec), aux_convention=aux_convention, aux=aux, method=method)
    config = file.config.fit(target.config)
    weights = read_weights(file, target.dtype if dtype is None else weight_dtype(dtype))
    if not align:
        check_basis(config, weights, target, draft=os.fspath(spec))
        return Bound(Eagle(config, **options), bind(config, weights, target, file.ids))
    basis = target.rotation
    if basis is None:
        raise ConfigError(
            f"align is asked for, but {target.name} "
            + ("comes without the matrix of its rotation" if target.basis else "is not rotated")
        )
    if "embed" in weights:
        check_rotation(weights["embed"], target, basis, whose="the draft's embedding")
    params = align_params(bind(config, weights, target, file.ids), config, basis)
    return Bound(Eagle(aligned(config, basis), **options), params)
