"""The weights of MTP modules, which layer of the target they are like, and what they borrow."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.tables import Assignment, Rule, materialize, plan
from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.layouts import OWN, own_rules
from eaglejax.drafts.mtp.files.read import ModuleStore, MtpFile
from eaglejax.drafts.mtp.model import MtpParams, Weights, param_table
from eaglejax.errors import CheckpointError, MismatchError
from eaglejax.kv_format import kv_format
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.block import Block
from eaglejax.nn.linear import PackedWeight
from eaglejax.pytree import leaf_paths, unflatten


def layer_kinds(target: ModelConfig) -> Iterator[Block]:
    """Layers that a module can be like: the target's own, the last one first, each kind once. A layer whose
    memory does not grow is none: a tree would have to be taken out of it again."""
    seen: list[Block] = []
    for index in reversed(range(target.num_layers)):
        block = target.block(index)
        memory = block.mixer.cache_table(1, 1, kv_format("float32"))
        if block not in seen and memory.capacity is not None:
            seen.append(block)
            yield block


def fit(file: MtpFile, target: ModelConfig) -> tuple[MtpConfig, list[Assignment]]:
    """(configuration on ``target``, which tensors make which leaf), by the kind of layer that they fit.

    Raises MismatchError for modules of another model, and CheckpointError for a missing or unexpected tensor.
    """
    _check_widths(file, target)
    first: CheckpointError | None = None
    for block in layer_kinds(target):
        config = MtpConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            block=block,
            modules=len(file.numbers),
            recycle=file.recycle,
            own_embedding=bool(file.embeddings),
            own_head=_heads(file),
            embed_scale=target.embed_scale,
            softcap=target.final_softcap,
            basis=file.basis,
            feature_map=file.layout == OWN and "feature_map" in file.store.names(),
        )
        try:
            return config, _planned(file, config, target)
        except CheckpointError as error:
            first = first or error
    raise first or MismatchError(
        f"{file.path} holds MTP modules, and no layer of the target is one that they could be like"
    )


def _heads(file: MtpFile) -> bool:
    if file.layout == OWN:
        return "modules.0.head" in file.store.names()
    return file.naming.parts["head"].replace("{i}", str(file.numbers[0])) in file.store.names()


def _check_widths(file: MtpFile, target: ModelConfig) -> None:
    store = file.store
    if file.layout == OWN:
        width = store.shape("modules.0.fc")[-1]
    else:
        width = store.shape(file.naming.parts["fc"].replace("{i}", str(file.numbers[0])))[0]
    if width != target.hidden_size:
        raise MismatchError(
            f"{file.path} holds MTP modules of width {width}, the target's states are {target.hidden_size} "
            "wide: they belong to another model"
        )
    said = file.raw.get("vocab_size")
    sizes = [store.shape(name)[0] for name in file.embeddings] + ([said] if isinstance(said, int) else [])
    for size in sizes:
        if size != target.vocab_size:
            raise MismatchError(
                f"{file.path} holds MTP modules for a vocabulary of {size} tokens, the target has "
                f"{target.vocab_size}: they belong to another model"
            )


def shared_leaves(file: MtpFile) -> tuple[str, ...]:
    """Leaves that the first module has for all."""
    return () if file.layout == OWN else file.naming.shared


def _planned(file: MtpFile, config: MtpConfig, target: ModelConfig) -> list[Assignment]:
    table = param_table(config)
    shared = shared_leaves(file)
    for module in table["modules"][1:]:
        for leaf in shared:
            module.pop(leaf, None)
    rules: list[Rule]
    if file.layout == OWN:
        rules = own_rules(table)
    else:
        rules = file.naming.rules(target, file.numbers)
        if file.embeddings:
            rules = [*rules, Rule("embed", file.embeddings[0])]
    spare = [re.escape(name) for name in file.embeddings[1:]]
    return plan(table, rules, file.store, where=str(file.path), ignorable=spare)


def read_weights(file: MtpFile, config: MtpConfig, assignments: list[Assignment], dtype: Any) -> Weights:
    """The modules' weights, each in what ``param_table`` of ``dtype`` holds it in."""
    for other in file.embeddings[1:]:
        if not _same(file.store, file.embeddings[0], other):
            raise CheckpointError(
                f"{file.path}: {file.embeddings[0]} and {other} differ, and modules have one embedding"
            )
    infos = leaf_paths(param_table(config, dtype))
    leaves = {}
    for assignment in assignments:
        info = infos[assignment.leaf]
        made = materialize(dataclasses.replace(assignment, info=info), file.store)
        leaves[assignment.leaf] = jnp.asarray(made)
    for leaf in infos:
        if leaf not in leaves:
            leaves[leaf] = leaves[re.sub(r"^modules\.\d+", "modules.0", leaf)]
    return unflatten(param_table(config, dtype), leaves)


def _same(store: ModuleStore, a: str, b: str, step: int = 4096) -> bool:
    rows = store.shape(a)[0]
    return store.shape(a) == store.shape(b) and all(
        np.array_equal(store.rows(a, i, min(i + step, rows)), store.rows(b, i, min(i + step, rows)))
        for i in range(0, rows, step)
    )


def bind(file: MtpFile, target: Target, dtype: Any) -> tuple[MtpConfig, MtpParams]:
    """(configuration, weights joined with what they borrow of ``target``).

    A copy of the target's embedding or head, as DeepSeek's modules have, is not held twice.
    """
    config, assignments = fit(file, target.config)
    weights = read_weights(file, config, assignments, dtype)
    embed, (head, tied) = target.params["embed"], target_head(target)
    if config.own_embedding and _equal(weights["embed"], embed):
        weights = {name: value for name, value in weights.items() if name != "embed"}
        config = dataclasses.replace(config, own_embedding=False)
    theirs = head.T if tied and not isinstance(head, PackedWeight) else head
    if config.own_head and all(_equal(module["head"], theirs) for module in weights["modules"]):
        modules = [{k: v for k, v in module.items() if k != "head"} for module in weights["modules"]]
        weights = {**weights, "modules": modules}
        config = dataclasses.replace(config, own_head=False)
    return config, join(config, weights, target)


def join(config: MtpConfig, weights: Weights, target: Target) -> MtpParams:
    """Weights with what they borrow of ``target``: the same arrays, not copies."""
    head, tied = target_head(target)
    return MtpParams(
        weights=weights,
        embed=None if config.own_embedding else target.params["embed"],
        head=None if config.own_head else head,
        tied=tied and not config.own_head,
    )


def _equal(own: Any, theirs: Any) -> bool:
    if isinstance(theirs, PackedWeight) or own.shape != theirs.shape:
        return False
    return bool(jnp.array_equal(own.astype(theirs.dtype), theirs))
