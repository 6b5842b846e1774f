"""Writing EAGLE drafts in the forms that other projects load, and converting between them.

A form is data: which tensors it holds under which names, and what it cannot say. What a form cannot say is
refused instead of dropped, since the other side would run a different draft without a word.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.files import check_output, fresh_folder, write_text
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.eagle.config import EagleConfig, default_boundaries
from eaglejax.drafts.eagle.files.dialects import write_config
from eaglejax.drafts.eagle.files.names import IGNORABLE, MASK, rules
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.files.settings import ARCHITECTURE
from eaglejax.drafts.eagle.files.vocabulary import looks_absolute
from eaglejax.drafts.eagle.methods import FormName
from eaglejax.drafts.eagle.model import Weights, param_table
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths
from eaglejax.quant.online import plain

Tensors = dict[str, Pending]

_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Form:
    """What one producer's checkpoints look like.

    ``versions``: EAGLE versions it knows. ``first``: prefix of EAGLE-3's first layer. ``map_always``: d2t is
    written for a full vocabulary too; ``t2d``: written beside it. ``embedding``: whether EAGLE-3 files keep
    the draft's own one although it is as wide as the target's. ``architecture`` by version. ``cannot``:
    settings that it has no place for. ``as_is``: files hold what the draft ships, no more and no less.
    """

    versions: tuple[int, ...]
    first: str
    map_always: bool
    t2d: bool
    embedding: bool
    architecture: Mapping[int, str]
    cannot: tuple[tuple[str, Callable[[EagleConfig], bool]], ...]
    as_is: bool = False


_ASCENDING: tuple[str, Callable[[EagleConfig], bool]] = (
    "boundaries that do not ascend",
    lambda c: list(c.aux) != sorted(c.aux),
)
_COMMON_LIMITS: tuple[tuple[str, Callable[[EagleConfig], bool]], ...] = (
    _ASCENDING,
    ("a logit softcap of its own", lambda c: c.own_head and c.softcap is not None),
    ("a scaled embedding", lambda c: c.embed_scale is not None),
    ("a map of the target's features", lambda c: c.feature_map),
    ("a mixture of experts", lambda c: c.num_experts > 0),
)
_PARALLEL = ("the masks of a draft that guesses in parallel", lambda c: c.parallel)
_PLAIN_LIMITS: tuple[tuple[str, Callable[[EagleConfig], bool]], ...] = (
    *_COMMON_LIMITS,
    _PARALLEL,
    ("norm_before_residual", lambda c: c.norm_before_residual),
    ("one norm over the joined features", lambda c: c.aux_norm == "joined"),
    ("q/k norms", lambda c: c.qk_norm),
    ("a bias of o_proj", lambda c: c.o_bias),
    ("sliding-window layers", lambda c: any(c.windows)),
)
_ONE_LAYER = ("more than one layer", lambda c: c.version == 3 and c.num_layers > 1)
_FUSED = ("reading the target's last state alone", lambda c: c.version == 3 and c.reads_final)
_THREE = ("another number of features than 3", lambda c: c.version == 3 and c.num_aux not in (0, 3))
_FIRST_BLOCK = (
    ("the embedding output (boundary 0) as a feature", lambda c: 0 in c.aux),
    (
        "boundaries that start at 1, which its readers take for block numbers",
        lambda c: bool(c.aux) and c.aux[0] == 1,
    ),
)
_HEAD_NORM = ("no norm before the head", lambda c: c.version == 3 and not c.head_norm)

FORMS: dict[FormName, Form] = {
    "safeailab": Form(
        (1, 3),
        "midlayer.",
        map_always=False,
        t2d=True,
        embedding=False,
        architecture={1: "LlamaForCausalLM", 3: "LlamaForCausalLM"},
        cannot=(
            *_PLAIN_LIMITS,
            _ONE_LAYER,
            _THREE,
            _FUSED,
            _HEAD_NORM,
            ("feeding the normalised state back", lambda c: c.feed_normed),
            ("a norm of each feature", lambda c: c.aux_norm == "each"),
            ("biases of q, k and v in EAGLE-3", lambda c: c.version == 3 and c.qkv_bias),
            ("a bias of fc in EAGLE-3", lambda c: c.version == 3 and c.fc_bias),
            ("heads of another size than H / heads", lambda c: c.head_dim * c.num_heads != c.hidden_size),
            (
                "rotary scaling but linear and dynamic",
                lambda c: c.rope.kind not in ("default", "linear", "dynamic"),
            ),
        ),
    ),
    "sglang": Form(
        (1, 3),
        "midlayer.",
        map_always=True,
        t2d=True,
        embedding=False,
        architecture={1: "LlamaForCausalLMEagle", 3: "LlamaForCausalLMEagle3"},
        cannot=(
            *_PLAIN_LIMITS,
            _ONE_LAYER,
            _THREE,
            _HEAD_NORM,
            ("biases of q, k and v in EAGLE-3", lambda c: c.version == 3 and c.qkv_bias),
            *_FIRST_BLOCK,
        ),
    ),
    "speculators": Form(
        (3,),
        "layers.0.",
        map_always=False,
        t2d=True,
        embedding=True,
        architecture={3: "Eagle3Speculator"},
        cannot=(
            *_COMMON_LIMITS,
            _FUSED,
            _HEAD_NORM,
            ("another hidden size than the target's", lambda c: c.hidden_size != c.target_hidden_size),
            ("biases of q, k, v without one of o_proj, or the reverse", lambda c: c.qkv_bias != c.o_bias),
            ("a bias of fc", lambda c: c.fc_bias),
            ("windows of several sizes", lambda c: len({w for w in c.windows if w}) > 1),
        ),
    ),
    "modelopt": Form(
        (3,),
        "layers.0.",
        map_always=False,
        t2d=False,
        embedding=False,
        architecture={3: "LlamaForCausalLMEagle3"},
        cannot=(
            *_PLAIN_LIMITS,
            _HEAD_NORM,
            ("a norm of each feature", lambda c: c.aux_norm == "each"),
            ("another hidden size than the target's", lambda c: c.hidden_size != c.target_hidden_size),
            ("biases of q, k and v", lambda c: c.qkv_bias),
            ("a bias of fc", lambda c: c.fc_bias),
            *_FIRST_BLOCK,
        ),
    ),
    # An architecture that no other loader knows: what this form leaves out, others would take for broken.
    "eaglejax": Form(
        (1, 3),
        "layers.0.",
        map_always=False,
        t2d=True,
        embedding=True,
        architecture={1: ARCHITECTURE, 3: ARCHITECTURE},
        cannot=(_ASCENDING,),
        as_is=True,
    ),
}


def tensors_of_weights(config: EagleConfig, weights: Weights) -> Tensors:
    """The weights of a draft under plain names, in the [out, in] form that files keep."""
    values = leaf_paths(param_table(config))
    flat = dict(zip(values, jax.tree.leaves(weights), strict=True))
    out: Tensors = {}
    for rule in rules(config.aux_norm):
        pattern = re.escape(rule.leaf).replace(r"\{l\}", r"(?P<l>\d+)")
        for leaf, value in flat.items():
            match = re.fullmatch(pattern, leaf)
            if match is None:
                continue
            parts = value if "{e}" in rule.name else [value]
            for e, part in enumerate(parts):
                name = rule.name.format(l=match.groupdict().get("l", ""), e=e)
                out[name] = _pending(part.T if rule.layout.transposed else part)
    return out


def _pending(value: Any) -> Pending:
    return Pending(tuple(value.shape), np.dtype(value.dtype), lambda: np.asarray(value))


def _reshaped(value: Pending, shape: tuple[int, ...]) -> Pending:
    new = np.empty(value.shape, np.bool_).reshape(shape).shape
    return Pending(new, value.dtype, lambda: value.make().reshape(new))


def tensors_of_file(file: DraftFile) -> Tensors:
    """The tensors of a checkpoint under plain names, as stored."""
    skip = [*IGNORABLE, *map(re.escape, file.unused)]
    names = [n for n in file.store.names() if not any(re.fullmatch(pattern, n) for pattern in skip)]
    store = file.store
    return {n: Pending(store.shape(n), store.dtype(n), functools.partial(store.array, n)) for n in names}


def write_draft(
    out: Path,
    config: EagleConfig,
    tensors: Tensors,
    ids: np.ndarray | None,
    *,
    to: FormName,
    target: Target | None = None,
    source: Mapping[str, Any] | None = None,
    verifier: str | None = None,
) -> list[str]:
    """Write a draft to the new folder ``out`` (config.json, model.safetensors), which appears complete or not
    at all; sentences on what was decided.

    ``tensors``: by plain name. ``ids`` [Vd]: target id of each draft id, or None. ``target``: gives parts
    that the draft borrows and the form wants in the file, and shows whether an embedding that the form has
    no place for is the target's own. ``source``: a config.json whose token ids and position limit are kept.
    ``verifier``: the target's name for forms that record it. Raises ConfigError for what the form cannot say
    and for a folder that is not empty.
    """
    if to not in FORMS:
        raise ConfigError(f"form {to!r} is not known; use one of {', '.join(FORMS)}")
    form = FORMS[to]
    if config.version not in form.versions:
        raise ConfigError(f"the {to} form has no EAGLE-{config.version} drafts; use another form")
    wrong = [text for text, has in form.cannot if has(config)]
    if wrong:
        raise ConfigError(f"the {to} form cannot hold this draft: it has no place for {', '.join(wrong)}")
    out = Path(out)
    check_output(out)
    notes: list[str] = []
    tensors = dict(tensors)
    if not form.as_is:
        _settle_parts(config, tensors, ids, form, to, target, notes)
    _settle_boundaries(config, to, target, notes)
    dtype = tensors["layers.0.self_attn.o_proj.weight"].dtype.name
    config = dataclasses.replace(config, own_embedding=_EMBED in tensors)
    tensors = {_name(name, config, form): value for name, value in tensors.items()}
    if MASK in tensors:
        tensors[MASK] = _reshaped(tensors[MASK], (1, 1, -1))
    if config.version == 3 and (ids is not None or form.map_always):
        full = np.arange(config.draft_vocab_size) if ids is None else np.asarray(ids, np.int64)
        tensors["d2t"] = _pending((full - np.arange(len(full))).astype(np.int64))
        if not form.t2d and looks_absolute(full - np.arange(len(full)), config.vocab_size):
            raise ConfigError(
                f"the {to} form has no t2d, and without it the map of these {len(full)} tokens, no two of "
                "which are neighbours, could be read as target ids as well as offsets; use another form"
            )
        if form.t2d:
            member = np.zeros(config.vocab_size, np.bool_)
            member[full] = True
            tensors["t2d"] = _pending(member)
    document = write_config(to, config, form.architecture[config.version], dtype, source or {}, verifier)
    with fresh_folder(out) as folder:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        write_text(folder / "config.json", json.dumps(document, indent=2) + "\n")
    return notes


def _name(name: str, config: EagleConfig, form: Form) -> str:
    if config.version == 3 and name.startswith("layers.0."):
        return form.first + name.removeprefix("layers.0.")
    return name


def _settle_parts(
    config: EagleConfig,
    tensors: Tensors,
    ids: np.ndarray | None,
    form: Form,
    to: str,
    target: Target | None,
    notes: list[str],
) -> None:
    """Add what the form wants of the target, drop what it leaves to the target."""
    wants_head = config.version == 3
    wants_embedding = config.version == 1 or config.hidden_size != config.target_hidden_size
    for name, wanted, kept in ((_HEAD, wants_head, False), (_EMBED, wants_embedding, form.embedding)):
        part = "embedding" if name == _EMBED else "head"
        if wanted and name not in tensors:
            if target is None:
                raise ConfigError(
                    f"the {to} form holds the {part}, which this draft borrows; name the target"
                )
            if name == _HEAD and target.config.final_softcap is not None:
                raise ConfigError(
                    f"the {to} form holds the head, but has no place for the target's logit softcap"
                )
            tensors[name] = _pending(_part_of(target, name, None if name == _EMBED else ids))
            notes.append(f"the target's {part} was copied into the file")
        elif name in tensors and not wanted and not kept:
            if target is None:
                raise ConfigError(
                    f"the {to} form leaves the {part} to the target, but this draft ships one; name the "
                    f"target, so "
                    "that it can be seen whether they are the same"
                )
            theirs = _part_of(target, name, None)
            own = tensors[name].make().astype(theirs.dtype)
            if not np.array_equal(own, theirs):
                raise ConfigError(
                    f"the draft's {part} differs from the target's and the {to} form cannot hold it"
                )
            del tensors[name]
            notes.append(f"the {part}, which equals the target's, was left out")


def _part_of(target: Target, name: str, ids: np.ndarray | None) -> np.ndarray:
    """The target's embedding, or its head at ``ids`` (None: all), as a file would hold it, [V, H]."""
    return np.asarray(plain(target.params["embed"]) if name == _EMBED else head_matrix(target, ids).T)


def _settle_boundaries(config: EagleConfig, to: str, target: Target | None, notes: list[str]) -> None:
    """The safeailab form names no boundaries: its code always reads the usual ones."""
    if to != "safeailab" or not config.aux:
        return
    if target is None:
        raise ConfigError(
            f"the safeailab form reads the usual boundaries 2, n/2, n-3; name the target, so that it can be "
            f"seen "
            f"whether {list(config.aux)} are those"
        )
    usual = default_boundaries(target.config.num_layers)
    if usual != config.aux:
        raise ConfigError(f"the safeailab form reads boundaries {list(usual)}, this draft {list(config.aux)}")
    notes.append(f"boundaries {list(usual)} are the usual ones and need no entry")
