"""Loading a smaller model as a draft, and telling such a model from an EAGLE draft."""

from __future__ import annotations

import os
from typing import Any

from eaglejax.checkpoint.demo import DEMO_DRAFTS
from eaglejax.checkpoint.files import weight_files
from eaglejax.checkpoint.hf import STEM, description_path, open_weights
from eaglejax.checkpoint.sources import Spec, resolve
from eaglejax.checkpoint.target import load_target
from eaglejax.drafts.base import Bound
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.eagle.files.load import draft_folder
from eaglejax.drafts.eagle.files.names import plain_name
from eaglejax.errors import MismatchError
from eaglejax.models.target import Target


def load_draft_model(
    spec: Spec, target: Target, *, length: int = 4, dtype: Any = None, cache_dtype: str | None = None
) -> Bound:
    """A smaller model with the target's tokenizer, ready for ``generate(..., proposer=...)``.

    ``spec``: as for ``load_target``. ``length``: drafts a round. ``dtype``: of its weights (None: the
    target's). ``cache_dtype``: format of its keys and values (None: ``dtype``). Raises MismatchError where
    the two tokenizers are not the same, RequestError where one has none, CheckpointError for files that
    cannot be read and ConfigError for a length below 1 and a format that is not known.
    """
    draft = load_target(spec, dtype=target.dtype if dtype is None else dtype)
    if draft.need_tokenizer().hash != target.need_tokenizer().hash:
        raise MismatchError(
            f"the draft {draft.name} has another tokenizer than the target {target.name}; their token ids "
            "mean different text. Name a draft of the same family"
        )
    proposer = DraftModel(
        draft.config, length=length, vocab_size=target.config.vocab_size, cache_dtype=cache_dtype
    )
    return Bound(proposer, draft.params)


def is_eagle(spec: Spec) -> bool:
    """Whether ``spec`` is an EAGLE draft and not a whole model, by its tensors: every EAGLE draft has ``fc``.

    Downloads what a Hub id names. Raises CheckpointError where there is nothing of that name.
    """
    if os.fspath(spec) in DEMO_DRAFTS:
        return True
    if resolve(spec).kind == "gguf":
        return False
    folder = draft_folder(spec)
    if description_path(folder) is not None:
        return False  # modelslim's files, whose names differ, hold whole models
    if not weight_files(folder, STEM, ".safetensors")[0]:
        # Whole models are read from safetensors alone.
        return True
    return any(plain_name(name) == "fc.weight" for name in open_weights(folder).names())
