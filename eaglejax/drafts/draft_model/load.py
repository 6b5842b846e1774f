"""Loading a smaller model as a draft."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.sources import Spec
from eaglejax.checkpoint.target import load_target
from eaglejax.drafts.base import Bound
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.errors import MismatchError
from eaglejax.models.target import Target


@dataclasses.dataclass(frozen=True)
class DraftModelFile:
    """Where a model lies that is to draft; there is nothing to understand before it is loaded."""

    path: Path
    notes: tuple[str, ...] = ()


def load_draft_model(
    spec: Spec, target: Target, *, length: int = 4, dtype: Any = None, cache_dtype: str | None = None
) -> Bound:
    """A smaller model with the target's tokenizer, ready for ``generate(..., proposer=...)``.

    ``spec``: as for ``load_target``. ``length``: drafts a round. ``dtype``: of its weights (None: the
    target's). ``cache_dtype``: format of its keys and values (None: ``dtype``). Raises MismatchError where
    the two tokenizers are not the same, RequestError where one has none, CheckpointError for files that
    cannot be read and ConfigError for a length beyond ``limits`` and a format that is not known.
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
