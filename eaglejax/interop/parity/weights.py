"""Targets and drafts of a ``TorchRunner`` in a blob: their trees of tensors, and the specs as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.interop.backends.arrays import PackedTensor, TurnedTensor, dtype_name, torch_dtype
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.eagle import Draft
from eaglejax.interop.models.runner import TorchDraft, TorchTarget
from eaglejax.interop.models.specs import from_dict, to_dict
from eaglejax.interop.parity.blob import Blob, BlobWriter

_NODES = {cls.__name__: cls for cls in (PackedTensor, TurnedTensor, Draft)}
"""Dataclasses of tensors and settings that a tree may hold."""


def write_models(blob: BlobWriter, target: TorchTarget, draft: TorchDraft) -> dict[str, Any]:
    """Append the weights of both; what :func:`read_models` needs to know. Raises ConfigError."""
    writer = _TreeWriter(blob)
    return {
        "target": {
            "spec": to_dict(target.spec),
            "weights": writer.describe("target", target.params),
            "cache_dtype": target.cache_dtype,
        },
        "draft": {
            "spec": to_dict(draft.spec),
            "weights": writer.describe("draft", draft.draft),
            "cache_dtype": draft.cache_dtype,
        },
        "tree": to_dict(draft.tree),
    }


def read_models(blob: Blob, described: Mapping[str, Any]) -> tuple[TorchTarget, TorchDraft]:
    """What :func:`write_models` wrote. Raises CheckpointError and ConfigError."""
    read = _TreeReader(blob).read
    target, draft = described["target"], described["draft"]
    return (
        TorchTarget(from_dict(target["spec"]), read(target["weights"]), target["cache_dtype"]),
        TorchDraft(
            from_dict(draft["spec"]),
            read(draft["weights"]),
            from_dict(described["tree"]),
            draft["cache_dtype"],
        ),
    )


class _TreeWriter:
    """Describes trees; a tensor that stands in several places (a borrowed embedding) is written once."""

    def __init__(self, blob: BlobWriter) -> None:
        self._blob = blob
        self._written: dict[tuple[Any, ...], str] = {}

    def describe(self, name: str, tree: Any) -> dict[str, Any]:
        """One node: a dict with its kind and what is in it."""
        if isinstance(tree, dict):
            return {"dict": {key: self.describe(f"{name}/{key}", x) for key, x in tree.items()}}
        if isinstance(tree, list | tuple):
            kind = "list" if isinstance(tree, list) else "tuple"
            return {kind: [self.describe(f"{name}/{i}", x) for i, x in enumerate(tree)]}
        if isinstance(tree, torch.Tensor):
            return {"tensor": self._tensor(name, tree)}
        if isinstance(tree, torch.dtype):
            return {"dtype": dtype_name(tree)}
        if type(tree).__name__ in _NODES:
            fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
            return {
                "node": [type(tree).__name__, {k: self.describe(f"{name}/{k}", x) for k, x in fields.items()}]
            }
        if tree is None or isinstance(tree, bool | int | float | str):
            return {"value": tree}
        raise ConfigError(f"{name} is a {type(tree).__name__}, which a parity bundle does not hold")

    def _tensor(self, name: str, tensor: torch.Tensor) -> str:
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key in self._written:
            return self._written[key]
        host = tensor.detach().cpu().contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.zeros(0, np.uint8)
        self._blob.add(name, raw.data, dtype_name(host.dtype), tuple(host.shape))
        if host.numel():
            self._written[key] = name
        return name


class _TreeReader:
    """Builds the trees again; what was one tensor is one tensor."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._tensors: dict[str, torch.Tensor] = {}

    def read(self, described: Mapping[str, Any]) -> Any:
        """The tree of one node's description."""
        ((kind, value),) = described.items()
        if kind == "dict":
            return {key: self.read(x) for key, x in value.items()}
        if kind == "list":
            return [self.read(x) for x in value]
        if kind == "tuple":
            return tuple(self.read(x) for x in value)
        if kind == "tensor":
            if value not in self._tensors:
                self._tensors[value] = self._blob.tensor(value)
            return self._tensors[value]
        if kind == "dtype":
            return torch_dtype(value)
        if kind == "node":
            name, fields = value
            return _NODES[name](**{key: self.read(x) for key, x in fields.items()})
        if kind == "value":
            return value
        raise CheckpointError(f"the manifest describes weights by {kind!r}, which is not known")
