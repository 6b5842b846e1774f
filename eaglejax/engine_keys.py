"""Keys of vLLM's ``--speculative-config`` that this project calls otherwise, does anyway, or cannot honour.

Each means here what it means there, or is refused with the reason; none is dropped because it is not known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class _Engine:
    """A key without a place here: values that ask for what is done ``anyway``, why there are no others."""

    anyway: tuple[Any, ...]
    reason: str


_INTERNAL = _Engine((), "vLLM fills it in itself; it is no setting")
_LOSSY = _Engine((), "it accepts drafts that the target would not, and the text is no longer the target's")
_NOT_HONOURED: dict[str, _Engine] = {
    "draft_tensor_parallel_size": _Engine((1,), "a draft is computed on one device"),
    "tensor_parallel_size": _Engine(
        (), "it is no key of a draft (vLLM calls that draft_tensor_parallel_size), and one device computes it"
    ),
    "enforce_eager": _Engine((False,), "rounds are compiled programs; there is no other way to run them"),
    "max_model_len": _Engine((), "a draft goes as far as its target does; --context bounds both"),
    "quantization": _Engine((), "a draft's weights are held as its files have them"),
    "moe_backend": _Engine(("auto",), "experts are computed in one way"),
    "attention_backend": _Engine(
        ("auto",), "the device's adapter chooses how attention is computed, of target and draft alike"
    ),
    "code_revision": _Engine((), "code of a model's repository is never run"),
    "draft_load_config": _Engine(
        ({}, {"load_format": "auto"}, {"load_format": "safetensors"}),
        "the form of a draft's files is told from them",
    ),
    "disable_padded_drafter_batch": _Engine((False,), "the rows of a batch always have one shape"),
    "disable_eagle_block_drop": _Engine((False,), "there are no cached blocks that drafts share"),
    "parallel_drafting": _Engine((False,), "a draft's own config.json says whether it guesses in parallel"),
    "use_local_argmax_reduction": _Engine((False,), "the vocabulary is not divided among devices"),
    "use_heterogeneous_vocab": _Engine((False,), "a draft has its target's tokenizer"),
    "index_share_for_mtp_iteration": _Engine((False,), "each step of an MTP module finds its own indices"),
    "synthetic_acceptance_rates": _LOSSY,
    "synthetic_acceptance_length": _LOSSY,
    "enable_adaptive_verification": _Engine(
        (), "--speculation says how much of a draft is judged: adaptive (the default) or fixed"
    ),
    "dspark_draft_topk": _Engine((), "the tree's settings say how many tokens a level drafts"),
    "draft_model_config": _INTERNAL,
    "draft_parallel_config": _INTERNAL,
    "target_model_config": _INTERNAL,
    "target_parallel_config": _INTERNAL,
    "disable_by_batch_size": _Engine(
        (), "num_speculative_tokens_per_batch_size says it: [[1, 8, 4], [9, 9, 0]] drafts up to 8 rows"
    ),
    "disable_logprobs": _Engine((), "--logprobs asks for them"),
    "disable_log_stats": _Engine((), "statistics cost nothing and are always there"),
    "acceptance_method": _Engine(("rejection_sampler",), _LOSSY.reason),
    "posterior_threshold": _LOSSY,
    "posterior_alpha": _LOSSY,
    "typical_acceptance_sampler_posterior_threshold": _LOSSY,
    "typical_acceptance_sampler_posterior_alpha": _LOSSY,
}

METHODS_ELSEWHERE = {
    "mlp_speculator": "drafts of the kind MLP speculator are not run",
    "custom_class": "a proposer of one's own is handed to generate(proposer=...) in Python",
    "extract_hidden_states": "`eaglejax features` writes a target's hidden states for training",
    "hydra": "drafts of the kind Hydra are not run",
    "pard": "drafts of the kind PARD are not run",
    "redrafter": "drafts of the kind ReDrafter are not run",
    "lookahead": "drafts come from a draft, a text or what was answered before; see docs/methods.md",
}
"""Methods of other engines that are not run here -> why, or what is there instead."""

_VERIFICATIONS = {"standard": "token", "block": "block"}
_DRAWS = {"greedy": False, "probabilistic": True}
Ranges = tuple[tuple[int, int, int], ...]


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """A speculative config in the words of this project: nulls, which mean vLLM's defaults, and what is done
    anyway left out, names of the same thing replaced. Raises ConfigError for what cannot be honoured."""
    out = {key: value for key, value in given.items() if value is not None}
    for key in [key for key in out if key in _NOT_HONOURED]:
        value, engine = out.pop(key), _NOT_HONOURED[key]
        if not any(type(value) is type(same) and value == same for same in engine.anyway):
            raise ConfigError(f"{key!r} in the speculative config cannot be honoured: {engine.reason}")
    if "draft_sample_method" in out:
        drawn = _choice(out, "draft_sample_method", _DRAWS)
        if out.setdefault("draft_sample", drawn) is not drawn:
            raise ConfigError("draft_sample and draft_sample_method contradict each other; give one")
    if out.get("rejection_sample_method") == "synthetic":
        raise ConfigError(f"rejection_sample_method 'synthetic' cannot be honoured: {_LOSSY.reason}")
    if "rejection_sample_method" in out:
        out["verification"] = _choice(out, "rejection_sample_method", _VERIFICATIONS)
    if out.get("kv_cache_dtype") == "auto":
        del out["kv_cache_dtype"]
    if "revision" in out:
        out["model"] = _revised(out.get("model"), out.pop("revision"))
    return out


def _choice(out: dict[str, Any], key: str, known: Mapping[str, Any]) -> Any:
    value = out.pop(key)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(
            f"{key!r} in the speculative config is {value!r:.80}; it is one of {', '.join(known)}"
        )
    return known[value]


def _revised(model: Any, revision: Any) -> str:
    if not isinstance(revision, str) or not revision:
        raise ConfigError(
            f"'revision' in the speculative config is {revision!r:.80}; it is a branch or a tag"
        )
    if not isinstance(model, str) or "@" in model or Path(model).expanduser().exists():
        raise ConfigError(
            f"'revision' {revision!r} goes with a 'model' that is the id of a repository on the Hub, which "
            f"{model!r} is not"
        )
    return f"{model}@{revision}"


def read_ranges(value: Any) -> Ranges | None:
    """``num_speculative_tokens_per_batch_size``: triples (first, last, drafts) of batch sizes, sorted; None
    for anything else. Raises ConfigError for ranges that leave out a single row, overlap or draft nothing."""
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(x, list) and len(x) == 3 and all(type(n) is int for n in x) for x in value):
        return None
    ranges = tuple(sorted(tuple(x) for x in value))
    where = "num_speculative_tokens_per_batch_size"
    if ranges[0][0] != 1:
        raise ConfigError(f"{where} begins at batches of {ranges[0][0]}; the first range begins at 1")
    for first, last, drafts in ranges:
        if last < first or drafts < 0:
            raise ConfigError(
                f"{where} has [{first}, {last}, {drafts}]; a range is [first, last, drafts], first <= last "
                "and drafts 0 or more"
            )
    for (_, last, _), (first, *_) in itertools.pairwise(ranges):
        if first <= last:
            raise ConfigError(f"{where} has two ranges for batches of {first}")
    if not any(drafts for *_, drafts in ranges):
        raise ConfigError(f"{where} drafts nothing at any size; that is method 'ar'")
    return ranges
