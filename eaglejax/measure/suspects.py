"""The tests of a diagnosis, one a suspect: each finds its own fault in a pair and no other (``diagnose``)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.drafts.detect import align_command, fits_any_folding
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.errors import EaglejaxError, MismatchError
from eaglejax.measure.findings import STEPS, Finding
from eaglejax.measure.pair import Pair
from eaglejax.measure.quality import Acceptance, Texts
from eaglejax.models.config import FINAL
from eaglejax.models.target import Target
from eaglejax.rotation.recover import recover_basis
from eaglejax.rotation.tables import compare_tables

KNOWN = 0.5
"""Share of the answers' tokens that a reduced vocabulary has to hold."""


def of_another_target(pair: Pair, original: Target, texts: Texts) -> Finding:
    """Does the draft guess better beside the model that it is said to be made for?"""
    there = pair.with_target(original, texts)
    text = (
        f"beside {original.name} {there} of drafts 1, 2, ... are right, beside {pair.target.name} {pair.base}"
    )
    try:
        recover_basis(original, pair.target)
    except MismatchError as error:
        tables = compare_tables(original.params["embed"], pair.target.params["embed"])
        if there.beats(pair.base) and (tables is None or tables.relation == "different"):
            return Finding(
                "target",
                "fail",
                f"{text}; {error}",
                f"use the draft with {original.name}, or train one for {pair.target.name}",
            )
    if there.beats(pair.base):
        return Finding("target", "unknown", f"{text}; the two are one model, see basis")
    return Finding("target", "pass" if pair.healthy else "unknown", text)


def of_another_text(pair: Pair, usual: Texts) -> Finding:
    """Does the draft guess better on usual texts than on those that it is used on?"""
    there = pair.on(usual)
    text = f"on usual prompts {there} of drafts 1, 2, ... are right, on yours {pair.base}"
    if there.beats(pair.base):
        return Finding("texts", "fail", text, "train the draft on texts like yours")
    return Finding("texts", "pass" if pair.healthy else "unknown", text)


def tokenizer(target: Target, file: Any) -> Finding:
    """Do ids mean the same tokens to both? Decided by the tokenizer that the draft's folder ships."""
    own = draft_tokenizer(file.path)
    if target.tokenizer is None or own is None:
        lacking = (
            "the target has no tokenizer" if target.tokenizer is None else "the draft's folder ships none"
        )
        return Finding("tokenizer", "unknown", f"{lacking}: that ids mean the same tokens is not known")
    if own.hash == target.tokenizer.hash:
        return Finding("tokenizer", "pass", f"both are {own.hash[:12]}")
    a, b = ({i: t for t, i in x.backend.get_vocab().items()} for x in (own, target.tokenizer))
    other = [i for i in sorted(a.keys() | b.keys()) if a.get(i) != b.get(i)]
    first = other[0]
    return Finding(
        "tokenizer",
        "fail",
        f"{len(other)} of {max(len(a), len(b))} ids mean other tokens: {first} is {a.get(first)!r} to the "
        f"draft and {b.get(first)!r} to the target",
        "use a draft that was trained for this target's tokenizer",
    )


def draft_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a draft's folder, None where there is none."""
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def aux_layers(pair: Pair) -> Finding:
    """Are the boundaries those that the draft was trained on, in their order?"""
    taps = list(pair.config.taps)
    if FINAL in taps:
        return Finding("aux_layers", "pass", "the draft reads the last state alone")
    tried = {
        f"boundaries {list(aux)}": pair.try_(features=pair.features.read(aux))
        for aux in pair.probe.boundaries(pair.config, pair.target.config.num_layers)
    }
    return pair.judge(
        "aux_layers",
        tried,
        "load with aux=(...) or --aux, or --aux-convention block|boundary; or correct the ids in config.json",
        f"boundaries {taps}",
    )


def basis(pair: Pair, original: Target | None = None) -> Finding:
    """Is the draft in the target's basis? By ids, by geometry, and by turning it: by the matrix that the
    target exports, or by the one that takes the ``original`` to it."""
    target, config, params = pair.target, pair.config, pair.params
    matrix = target.rotation
    ids = f"the target's basis is {target.basis}, the draft's {config.basis}"
    own = pair.family.own_embedding(params)
    tables = None if own is None else compare_tables(own, target.params["embed"])
    remedy = f"`{align_command(str(pair.file.path), target, recover=matrix is None)}`"
    if config.basis is not None:
        remedy = "the draft was aligned twice, or to another target: start from the original draft"
    if config.basis is None and target.basis is None and tables is not None and tables.relation == "rotated":
        return Finding("basis", "fail", f"the target was rotated without saying so: {tables}", remedy)
    tried = {}
    turns = {} if matrix is None else {"aligned to the target": matrix}
    if original is not None and config.basis is None:
        try:
            found_basis = recover_basis(original, target)
        except MismatchError as error:
            ids += f"; {error}"
        else:
            turns[f"aligned by the rotation that takes {original.name} to the target"] = found_basis.basis
            ids += f"; the target is {original.name} turned, within {found_basis.error:.1%}"
    for name, turn in turns.items():
        if config.basis is not None:
            continue
        try:
            aligned = pair.family.align(params, config, turn)
        except EaglejaxError as error:
            # Exports of other tools lack the weight of the final norm, which this draft needs.
            ids += f"; aligning was not tried: {error}"
        else:
            tried[name] = pair.try_(params=aligned)
    if matrix is not None and config.basis is not None:
        once = FeatureAdapter(target=(jnp.asarray(matrix.matrix),) * len(config.reads.features))
        tried["turned back once"] = pair.try_(params=dataclasses.replace(params, adapter=once))
    found = pair.judge("basis", tried, remedy, ids)
    if found.verdict == "fail":
        return found
    if config.basis != target.basis and not fits_any_folding(config, matrix) and not pair.healthy:
        return Finding("basis", "fail", ids, remedy)
    if pair.healthy or (tables is not None and tables.relation == "same"):
        return Finding("basis", "pass", ids if tables is None else f"{ids}; {tables}")
    if config.basis is None and _folded(target):
        ids += (
            "; every norm of the target has weight 1, as after a rotation that folded them: name the "
            "original with --original-target to measure it"
        )
    return Finding("basis", "unknown", ids + ("" if tables is None else f"; {tables}"))


def _folded(target: Target) -> bool:
    plain = 0.0 if target.config.norm_offset else 1.0
    norms = [target.params["norm"], *(layer["attn_norm"] for layer in target.params["layers"])]
    return all(bool(jnp.all(x == plain)) for x in norms)


def positions(pair: Pair) -> Finding:
    """Is each token paired with the right feature, and are distances what the draft learnt?"""
    features = pair.features.read(pair.config.taps)
    tried = {
        f"features moved by {shift:+d}": pair.try_(features=jnp.roll(features, -shift, 1))
        for shift in (-1, 1)
    }
    tried |= pair.try_each(pair.probe.ropes((pair.config, pair.params), pair.target))
    return pair.judge(
        "positions",
        tried,
        "correct rope_theta and rope_scaling in the draft's config.json; a draft that wants moved features "
        "was trained with another pairing of features and tokens: train it again",
        "the pairing of tokens with features and the rotary settings",
    )


def vocabulary(pair: Pair) -> Finding:
    """Does each draft id mean the target id that it is mapped to? Found by learning the map from half of the
    places and judging it on the other half; a map that leaves out what the target writes is found by
    count."""
    where = pair.texts.starts(STEPS)[:, :-1]
    truth = np.roll(pair.texts.tokens, -2, axis=1)[:, :-1][where]
    drafted = pair.drafted[0][where]
    mapped = drafted if pair.ids is None else np.asarray(pair.ids)[drafted]
    learn = np.arange(len(truth)) % 2 == 0
    relabel = {
        int(d): int(np.bincount(truth[learn & (drafted == d)]).argmax()) for d in np.unique(drafted[learn])
    }
    guess = np.asarray([relabel.get(int(d), -1) for d in drafted])
    count = int((~learn).sum())
    learnt = Acceptance((float((guess == truth)[~learn].mean()),), count)
    given = Acceptance((float((mapped == truth)[~learn].mean()),), count)
    known = 1.0 if pair.ids is None else float(np.isin(truth, np.asarray(pair.ids)).mean())
    sizes = f"{pair.config.draft_vocab_size} of {pair.config.vocab_size} ids"
    size = f"{sizes} hold {known:.0%} of the answers' tokens"
    if known < KNOWN:
        remedy = (
            "the map is another draft's, or was counted on other texts: train the draft with one that fits"
        )
        return Finding("vocabulary", "fail", size, remedy)
    if learnt.beats(given):
        moved = sum(int(m != relabel[int(d)]) for d, m in {*zip(drafted[learn], mapped[learn], strict=True)})
        return Finding(
            "vocabulary",
            "fail",
            f"a map learnt from half of the places is right on {learnt} of the rest, the file's on {given}; "
            f"{moved} ids differ",
            "d2t belongs to another head: take the map that the draft was trained with",
        )
    if pair.healthy:
        return Finding("vocabulary", "pass", f"{size}; no other map does better")
    return Finding(
        "vocabulary", "unknown", f"{size}; no map learnt from the guesses does better than {given}"
    )


def template(pair: Pair) -> Finding:
    """Are prompts rendered as in training? By the template that the draft's folder ships, and by whether
    plain text suits the draft better than the target's chat format."""
    own = _shipped_template(pair.file.path)
    theirs = pair.target.tokenizer.chat_template if pair.target.tokenizer is not None else None
    if own is not None and theirs is not None and own.strip() != theirs.strip():
        return Finding(
            "template",
            "fail",
            "the draft's folder ships another chat template than the target's",
            "render prompts with the template that the draft was trained on",
        )
    others = {k: v for k, v in pair.measured.items() if v is not pair.base}
    for name, found in others.items():
        if found.beats(pair.base):
            kind = next(k for k, v in pair.measured.items() if v is pair.base)
            return Finding(
                "template",
                "fail",
                f"on {name} prompts {found} of drafts 1, 2, ... are right, on {kind} prompts {pair.base}",
                f"use it on {name} prompts, or train it on {kind} ones",
            )
    if own is not None and theirs is not None:
        return Finding("template", "pass", "the draft's folder ships the target's chat template")
    if others and pair.healthy:
        return Finding("template", "pass", f"prompts of {len(others)} other kind suit the draft no better")
    return Finding("template", "unknown", "the draft's folder ships no chat template")


def _shipped_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = (
        json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    )
    return found if isinstance(found, str) else None


def norms(pair: Pair) -> Finding:
    """Are numbers finite, do the draft's norms stand where it was trained with them, and is every other
    choice that its config makes the right one?"""
    config, weights = pair.config, pair.params.weights
    bad = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
        if not bool(jnp.all(jnp.isfinite(leaf)))
    ]
    if bad:
        return Finding("norms", "fail", f"{bad[0]} holds NaN or infinite numbers", "the file is damaged")
    features = pair.features.read(config.taps)
    dtype = pair.probe.dtype_of(weights)
    written = jnp.asarray(np.arange(features.shape[1]) < pair.texts.lengths[:, None])[:, :, None, None]
    if not bool(jnp.all(jnp.isfinite(jnp.where(written, features, 0).astype(dtype)))):
        return Finding(
            "norms", "fail", f"the target's features overflow {dtype}", "run the draft in bfloat16 or float32"
        )
    setup = (config, pair.params)
    tried = pair.try_each(pair.probe.norm_choices(setup, pair.file))
    tried |= pair.try_each(pair.probe.part_choices(setup, pair.file, pair.target))
    if FINAL in config.taps:
        last = pair.features.boundary[:, :, -1:]
        tried["the state before the final norm"] = pair.try_(features=last)
    return pair.judge("norms", tried, "set these in the draft's config.json", f"{dtype} holds every number")
