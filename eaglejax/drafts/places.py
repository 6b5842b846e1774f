"""Where the files of a draft lie, whatever its family. Nothing here imports jax: a name that names nothing is
refused before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from eaglejax.checkpoint.demo import DEMO_DRAFTS, demo_draft
from eaglejax.checkpoint.files import weight_files, weight_map
from eaglejax.checkpoint.sources import Spec, resolve
from eaglejax.errors import CheckpointError

SAFETENSORS, BIN = ("model", ".safetensors"), ("pytorch_model", ".bin")
"""Stem and suffix of the weights' files."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What a repository without safetensors may hold instead: one pickle, or the index of several."""
LONE_HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Names of the file of heads that lie beside no other weights (Medusa's), the first that is there."""


def draft_path(spec: Spec) -> Path:
    """The local folder, or GGUF file, of a draft; see ``files.opened``.

    Published drafts may be pickles (``pytorch_model.bin``), which are fetched when there is nothing else;
    they are read without being run. Raises CheckpointError.
    """
    if os.fspath(spec) in DEMO_DRAFTS:
        return demo_draft(os.fspath(spec))
    source = resolve(spec)
    hub = source.kind == "folder" and not Path(source.spec).expanduser().is_dir()
    if hub and not weight_files(source.path, *SAFETENSORS)[0] and lone_heads(source.path) is None:
        _fetch_pickles(os.fspath(spec))
    return source.path


def lone_heads(folder: Path) -> Path | None:
    """The file of heads alone that a folder has."""
    return next((folder / name for name in LONE_HEADS if (folder / name).is_file()), None)


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
            for name in sorted(set(weight_map(fetch(index)).values())):
                fetch(name)
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                fetch(LONE_HEADS[-1])
                return
            raise CheckpointError(
                f"{spec} holds no safetensors weights and its {single} cannot be fetched"
            ) from error
