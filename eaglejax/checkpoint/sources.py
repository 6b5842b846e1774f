"""What a user may name as a model: a demonstration word, a Hub id, a folder or a GGUF file.

A name that names nothing is refused before jax is imported, as the readers of files do.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

from eaglejax.checkpoint.demo import DEMOS, demo_path
from eaglejax.checkpoint.files import read_json
from eaglejax.errors import CheckpointError

Spec = str | os.PathLike[str]

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""What is fetched from the Hub: safetensors, configuration and tokenizer; no pickles, no code."""

_HUB_SKIP = ["*/*", "consolidated*"]  # other formats' copies of the same weights; what is named comes after
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+\.gguf))?")


@dataclasses.dataclass(frozen=True)
class Source:
    """A resolved model. ``spec``: what the user wrote; ``path``: the local folder or file."""

    spec: str
    kind: Literal["folder", "gguf"]
    path: Path


def resolve(spec: Spec) -> Source:
    """Find a model, downloading it where the spec asks for that.

    ``spec``: ``demo`` or ``demo-gemma``; an existing folder or .gguf file; or a Hub id ``owner/name``,
    optionally with ``@revision`` and, for one file of a GGUF repository, ``:name.gguf``. Raises
    ``CheckpointError`` when it is none of these or cannot be fetched.
    """
    text = os.fspath(spec)
    if text in DEMOS:
        return Source(text, "gguf", demo_path(text))
    path = Path(text).expanduser()
    if text and path.is_dir():
        _refuse_gguf_folder(path)
        return Source(text, "folder", path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{path} is not a .gguf file; for safetensors name the folder that holds config.json"
            )
        return Source(text, "gguf", path)
    match = _HUB_ID.fullmatch(text)
    if match is None or text.startswith((".", "~")) or (path.suffix.lower() == ".gguf" and not match["file"]):
        words = ", ".join(DEMOS)
        raise CheckpointError(
            f"{text!r} names no model: there is no such folder or file; give a path, a Hub id (owner/name) "
            f"or one of: {words}"
        )
    return _from_hub(text, match["repo"], match["revision"], match["file"])


def _refuse_gguf_folder(folder: Path) -> None:
    """A folder that holds GGUF files alone: which of them is meant has to be said."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if found and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no config.json but {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}; "
            f"name the .gguf file itself: {folder / found[0]}"
        )


def _from_hub(spec: str, repo: str, revision: str | None, file: str | None) -> Source:
    if file is None:
        folder = _snapshot(repo, revision, HUB_FILES, _HUB_SKIP)
        _snapshot(repo, revision, _named_files(folder), None)
        return Source(spec, "folder", folder)
    from eaglejax.checkpoint.gguf.reader import part_paths

    parts = [path.as_posix() for path in part_paths(Path(file))]
    folder = _snapshot(repo, revision, parts, None)
    if not (folder / file).is_file():
        raise CheckpointError(f"{repo} has no file {file!r} on the Hub")
    return Source(spec, "gguf", folder / file)


def _named_files(folder: Path) -> list[str]:
    """Files of subfolders that belong to the model in ``folder``: its rotation, at the usual place or
    where its description has it."""
    from eaglejax.checkpoint.basis_file import FILE, named_rotation
    from eaglejax.checkpoint.hf import description_path

    description = description_path(folder)
    named = None if description is None else named_rotation(read_json(description))
    return sorted({FILE, *([os.path.normpath(named)] if isinstance(named, str) else [])})


def _snapshot(repo: str, revision: str | None, allow: list[str], ignore: list[str] | None) -> Path:
    """The local copy of a repository, with the files that match ``allow`` and not ``ignore``. Raises
    CheckpointError that says why there is none."""
    import huggingface_hub.errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore
            )
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence on the Hub and run `hf auth login`"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is neither a local folder nor a repository of the Hub (or it is private)"
        ) from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the Hub") from error
    except (OSError, huggingface_hub.errors.HTTPError) as error:
        raise CheckpointError(
            f"{repo} is not in the local Hub cache and the Hub does not answer; go online once, "
            "or copy the repository to a folder and name that, or use 'demo'"
        ) from error
