"""Kinds of drafts that are published and do not run here: recognised, so that they are refused by their own
names instead of as broken drafts of another kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from eaglejax.drafts.files import DraftFiles


@dataclasses.dataclass(frozen=True)
class KnownDraft:
    """One kind. ``types``: what ``speculators_model_type``, ``model_type`` or an ``algorithm`` calls it;
    ``architectures``: pattern of its class names; ``keys``: keys of config.json that it alone has; ``files``:
    pattern of the names of weight files that it alone has; ``shown``: whether tensors of these names are its.
    ``unless``: pattern of types and class names in whose company its keys are another kind's.
    """

    name: str
    types: tuple[str, ...] = ()
    architectures: str | None = None
    keys: tuple[str, ...] = ()
    files: str | None = None
    unless: str | None = None
    shown: Callable[[Collection[str]], bool] = lambda names: False

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """What in config.json says so, None where nothing does."""
        for key, value in stated_types(raw):
            if value.lower().replace("-", "_") in self.types:
                return f"{key} {value!r}"
        for value in class_names(raw):
            if self.architectures and re.search(self.architectures, value):
                return f"architectures {value!r}"
        others = [value for _, value in stated_types(raw)] + class_names(raw)
        if self.unless and any(re.search(self.unless, value) for value in others):
            return None
        for key in self.keys:
            inner = raw.get("eagle_config")
            for place in (raw, inner if isinstance(inner, Mapping) else {}):
                given = place.get(key)
                # A count of one step, a false or a null switches the kind off.
                if given not in (None, False, 0, [], {}) and not (
                    key == "parallel_draft_step" and given == 1
                ):
                    return f"{key} {given!r}" if isinstance(given, int | str) else key
        return None

    def holds(self, files: DraftFiles) -> bool:
        """Whether the folder's weights are its, by the names of files or tensors."""
        if files.gguf:
            return False
        pattern = self.files
        if pattern and any(re.fullmatch(pattern, path.name) for path in files.path.iterdir()):
            return True
        return self.shown(files.names)


def class_names(raw: Mapping[str, Any]) -> list[str]:
    """The names of classes under ``architectures`` of a config.json."""
    given = raw.get("architectures")
    return [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]


def stated_types(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, value) wherever a config.json names the kind of model that it belongs to."""
    inner = raw.get("speculators_config")
    places = [
        ("speculators_model_type", raw.get("speculators_model_type")),
        ("speculators_config.algorithm", inner.get("algorithm") if isinstance(inner, Mapping) else None),
        ("algorithm", raw.get("algorithm")),
        ("spec_type", raw.get("spec_type")),
        ("model_type", raw.get("model_type")),
    ]
    return [(key, value) for key, value in places if isinstance(value, str)]


def _any(*patterns: str) -> Callable[[Collection[str]], bool]:
    """Whether some name fits each of the patterns, wrappers left aside."""

    def shown(names: Collection[str]) -> bool:
        return all(any(re.search(pattern, name) for name in names) for pattern in patterns)

    return shown


KNOWN: tuple[KnownDraft, ...] = (
    KnownDraft(
        "DSpark",
        types=("dspark", "kv_native_dspark"),
        architectures=r"(?i)dspark",
        keys=("dspark_config", "dspark_block_size", "markov_rank"),
        shown=_any(r"markov|confidence_head"),
    ),
    KnownDraft("DFlash 2 or Domino", types=("dflash2", "domino"), architectures=r"(?i)dflash2|domino"),
    KnownDraft(
        "EAGLE with parallel heads",
        keys=("parallel_draft_step",),
        shown=_any(r"(^|\.)parallel_draft_heads"),
    ),
    KnownDraft(
        "PARD",
        types=("pard",),
        architectures=r"PARD",
        keys=("pard_token", "ptd_token_id", "parallel_drafting"),
        # P-EAGLE drafts name their mask token by the same keys.
        unless=r"(?i)eagle",
    ),
    KnownDraft(
        "Hydra",
        types=("hydra",),
        architectures=r"(?i)hydra",
        keys=("hydra_num_heads", "hydra_num_layers", "hydra_head_arch"),
        files=r"hydra_lm_head\.(pt|safetensors|bin)",
        shown=_any(r"(^|\.)hydra_(head|mlp|lm_head)"),
    ),
    KnownDraft(
        "MLP speculator",
        types=("mlp_speculator",),
        architectures=r"MLPSpeculator",
        keys=("n_predict_mlp",),
        shown=_any(r"(^|\.)emb\.0\.weight$", r"(^|\.)proj\.0\.weight$", r"(^|\.)head\.0\.weight$"),
    ),
    KnownDraft(
        "ReDrafter",
        types=("redrafter", "recurrent_drafter"),
        architectures=r"(?i)(re|recurrent_?)drafter",
        keys=("redrafter_num_layers",),
    ),
)
"""Asked in this order, before the families that run: their patterns are the narrower ones."""
