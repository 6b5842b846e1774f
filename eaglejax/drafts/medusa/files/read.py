"""Understanding the checkpoint of Medusa heads: how many, of which shape, over which tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.torch_bin import TorchBinFile
from eaglejax.drafts.files import DraftFiles, TensorFile
from eaglejax.drafts.medusa.config import MedusaConfig, Output
from eaglejax.drafts.medusa.files.names import (
    FEATURE_MAP,
    TOKEN_MAP,
    counts,
    is_output,
    is_part,
    layout_of,
    plain_name,
)
from eaglejax.drafts.places import lone_heads
from eaglejax.errors import CheckpointError

KEY, KIND = "eaglejax", "medusa"
"""The block of config.json that the project's own form has, and what it says of heads."""
_OUT = {"medusa": "{head}.{layers}.weight", "vllm": "lm_heads.{head}.weight"}


class HeadStore:
    """The tensors of heads under plain names; what else a whole model's file holds is left out.

    ``picked``: the rows of the matrices to the vocabulary that count, in their order; None for all as they
    are.
    """

    def __init__(self, file: TensorFile, picked: np.ndarray | None = None) -> None:
        self._file, self._picked = file, picked
        self._names: dict[str, str] = {}
        # What lies in heads' own file and is no part of them is shown too, lest it be left out unsaid.
        whole = any("self_attn" in name for name in file.names())
        for name in file.names():
            short = plain_name(name)
            if whole and not is_part(short):
                continue
            if short in self._names:
                raise CheckpointError(
                    f"tensors {self._names[short]!r} and {name!r} are one and the same part of the heads; "
                    "keep one of them"
                )
            self._names[short] = name

    def picking(self, rows: np.ndarray | None) -> HeadStore:
        """The same tensors, of whose matrices to the vocabulary ``rows`` count."""
        return HeadStore(self._file, rows)

    def names(self) -> Collection[str]:
        """Plain names."""
        return self._names.keys()

    def _picks(self, name: str) -> np.ndarray | None:
        return self._picked if is_output(name) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        shape, picked = self._file.shape(self._names[name]), self._picks(name)
        return shape if picked is None else (len(picked), *shape[1:])

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor."""
        return self._file.dtype(self._names[name])

    def array(self, name: str) -> np.ndarray:
        """A tensor as stored."""
        value, picked = self._file.array(self._names[name]), self._picks(name)
        return value if picked is None else value[picked]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor."""
        picked = self._picks(name)
        if picked is None:
            return self._file.rows(self._names[name], start, stop)
        return self._file.array(self._names[name])[picked[start:stop]]


@dataclasses.dataclass(frozen=True, eq=False)
class MedusaFile:
    """Heads as read. ``config``: its ``vocab_size`` is config.json's or, where that is silent
    (``stated_vocab`` None), what the tensors speak of. ``ids`` [Vd] int64: target ids, ascending, None for
    all; the store has its matrices in their order."""

    path: Path
    layout: str
    config: MedusaConfig
    store: HeadStore
    ids: np.ndarray | None
    stated_vocab: int | None
    raw: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def head_tensors(files: DraftFiles) -> TensorFile:
    """The tensors of a folder with heads: of ``medusa_lm_head``, or of its weights under the usual names."""
    lone = lone_heads(files.path)
    if lone is None or files.names:
        return files.tensors
    return SafetensorsFile([lone]) if lone.suffix == ".safetensors" else TorchBinFile([lone])


def read_heads(files: DraftFiles) -> MedusaFile:
    """Understand the heads in ``files``. Raises CheckpointError that names what is wrong."""
    where, raw = str(files.path), files.raw
    store = HeadStore(head_tensors(files))
    layout = layout_of(store.names())
    if layout is None:
        some = ", ".join(sorted(store.names())[:4]) or "none of heads"
        raise CheckpointError(f"{where} holds no Medusa heads: its tensors are {some}")
    own = raw.get(KEY)
    own = own if isinstance(own, Mapping) else {}
    heads, layers, outputs = counts(store.names(), layout)
    notes = _check_counts(where, raw, heads, layers)
    alone = "lm_head.weight" in store.names()
    output: Output = "shared" if alone or (_flag(raw, "original_lm_head") and outputs == 1) else "each"
    if not outputs and not alone and (own.get("output") == "target" or _flag(raw, "original_lm_head")):
        output = "target"
    hidden, known = _sizes(store, where, layout, layers, output, raw)
    stated = _count(where, raw, "vocab_size")
    ids, picked = _tokens(where, raw, store, stated, known)
    known = len(ids) if ids is not None else known or stated or 0
    if not known:
        raise CheckpointError(
            f"{where} holds heads without an output matrix, and its config.json names no vocab_size"
        )
    config = MedusaConfig(
        vocab_size=stated or (known if ids is None else int(ids[-1]) + 1),
        draft_vocab_size=known,
        hidden_size=hidden,
        heads=heads,
        layers=layers,
        bias=any(name.endswith(".bias") for name in store.names()),
        output=output,
        logit_scale=_positive(where, raw if raw.get("model_type") == KIND else {}, "logit_scale") or 1.0,
        softcap=_positive(where, own, "softcap"),
        basis=_basis(where, own),
        feature_map=FEATURE_MAP in store.names(),
    )
    if own.get("feature_map") and not config.feature_map:
        raise CheckpointError(f"{where} lacks the tensor {FEATURE_MAP!r}, which its config.json promises")
    return MedusaFile(files.path, layout, config, store.picking(picked), ids, stated, raw, tuple(notes))


def _count(where: str, raw: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    value = raw.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise CheckpointError(
            f"{where}: {name} is {value!r} in config.json; it is an integer of {least} or more"
        )
    return value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    return raw.get(name) is True


def _positive(where: str, said: Mapping[str, Any], name: str) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: {name} is {value!r} in config.json; it is a positive number")
    return float(value)


def _basis(where: str, own: Mapping[str, Any]) -> str | None:
    basis = own.get("basis")
    if basis is not None and not (isinstance(basis, str) and basis):
        raise CheckpointError(f"{where}: {KEY}.basis is {basis!r} in config.json; it is the id of a basis")
    return basis


def _check_counts(where: str, raw: Mapping[str, Any], heads: int, layers: int) -> list[str]:
    """What config.json says of the numbers against the tensors; the names that vLLM gives them mean heads in
    a config of the type medusa alone."""
    notes, typed = [], raw.get("model_type") == KIND
    said = {"medusa_num_heads": (heads, "heads"), "medusa_num_layers": (layers, "residual blocks a head")}
    said |= (
        {"num_heads": said["medusa_num_heads"], "num_hidden_layers": said["medusa_num_layers"]}
        if typed
        else {}
    )
    for name, (found, what) in said.items():
        value = _count(where, raw, name, 0 if what != "heads" else 1)
        if value is None or value == found:
            continue
        if what == "heads" and value < found:
            notes.append(f"config.json says {value} heads, the file holds {found}; all are used")
            continue
        raise CheckpointError(f"{where}: {name} is {value} in config.json, and the file holds {found} {what}")
    return notes


def _sizes(
    store: HeadStore, where: str, layout: str, layers: int, output: Output, raw: Mapping[str, Any]
) -> tuple[int, int | None]:
    """(hidden size, rows of the first output matrix, None where there is none)."""
    if output == "target":
        out = None
    elif "lm_head.weight" in store.names():
        out = "lm_head.weight"
    else:
        out = _OUT[layout].format(head=0, layers=layers)
    first = f"{'0.0.linear' if layout == 'medusa' else 'blocks.0.layers.0'}.weight"
    for name in (first, out):
        if name is not None and name in store.names() and len(store.shape(name)) != 2:
            raise CheckpointError(f"{where}: tensor {name!r} has shape {store.shape(name)}; it is a matrix")
    known = store.shape(out)[0] if out is not None and out in store.names() else None
    if first in store.names():
        hidden = store.shape(first)[1]
    elif out is not None and out in store.names():
        hidden = store.shape(out)[1]
    else:
        raise CheckpointError(f"{where} lacks {first!r}, the first head's first matrix")
    stated = _count(where, raw, "hidden_size")
    if stated is not None and stated != hidden:
        raise CheckpointError(
            f"{where}: hidden_size is {stated} in config.json, and the heads are {hidden} wide"
        )
    return hidden, known


def _tokens(
    where: str, raw: Mapping[str, Any], store: HeadStore, vocab: int | None, known: int | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(ascending target ids of the draft's tokens, the stored rows in that order)."""
    size = _count(where, raw, "truncated_vocab_size")
    if TOKEN_MAP not in store.names():
        if size is not None and vocab is not None and size != vocab:
            raise CheckpointError(
                f"{where}: truncated_vocab_size is {size} of {vocab} tokens, and no {TOKEN_MAP} says which"
            )
        if known is not None and vocab is not None and known != vocab:
            raise CheckpointError(
                f"{where}: the heads know {known} tokens, config.json says {vocab}, and there is no "
                f"{TOKEN_MAP} that says which"
            )
        return None, None
    ids = np.asarray(store.array(TOKEN_MAP))
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise CheckpointError(f"{where}: {TOKEN_MAP} is {ids.dtype} {ids.shape}; it is a list of token ids")
    if size is not None and size != len(ids):
        raise CheckpointError(f"{where}: {TOKEN_MAP} has {len(ids)} ids, truncated_vocab_size is {size}")
    ids = ids.astype(np.int64)
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or (vocab is not None and ids.max() >= vocab):
        raise CheckpointError(
            f"{where}: {TOKEN_MAP} names an id twice or one that is none of the target's {vocab or ''} tokens"
        )
    order = np.argsort(ids)
    # Matrices over all tokens may come with a map too; their rows are then taken by it.
    rows = ids[order] if known is not None and known > len(ids) else order
    if known is not None and known not in (len(ids), vocab):
        raise CheckpointError(f"{where}: the heads know {known} tokens, and {TOKEN_MAP} names {len(ids)}")
    return ids[order], None if np.array_equal(rows, np.arange(known or len(ids))) else rows
