"""Why is acceptance low? One test a suspect, each of which can find its own fault.

Most faults of a pair leave the text right and cost acceptance alone. Each is tried the other way round on
texts that the target wrote (``measure``): a change of the pair that makes the draft guess much better names
the fault. Where nothing helps and acceptance is low all the same, a test says ``unknown``: another fault may
hide its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.drafts.align import align_params
from eaglejax.drafts.detect import align_command, fits_any_folding
from eaglejax.drafts.eagle.config import EagleConfig, default_boundaries
from eaglejax.drafts.eagle.features import FeatureAdapter
from eaglejax.drafts.eagle.files.load import bind, read_weights
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.errors import EaglejaxError
from eaglejax.measure.quality import Acceptance, Features, Texts, acceptance, guesses
from eaglejax.models.target import Target
from eaglejax.rotation.tables import compare_tables

Verdict = Literal["pass", "fail", "unknown"]
STEPS = 3
"""Drafts in a row that are judged."""
HEALTHY = 0.3
"""First-draft rate from which on no fault can be hiding the others; trained drafts reach 0.5 to 0.8."""
KNOWN = 0.5
"""Share of the answers' tokens that a reduced vocabulary has to hold."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict of one test, what it rests on, and what to do about a failure."""

    test: str
    verdict: Verdict
    evidence: str
    remedy: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """``findings``, one a test; ``measured``: acceptance as configured on each kind of text."""

    findings: tuple[Finding, ...]
    measured: Mapping[str, Acceptance]

    @property
    def faults(self) -> list[Finding]:
        """The failures."""
        return [f for f in self.findings if f.verdict == "fail"]


class Pair:
    """A target and a draft as configured, on texts of the first kind; alternatives are measured against it.

    ``texts``: kinds of text by name, ``chat`` (through the chat template) or ``plain``; the first is what the
    pair is used on.
    """

    def __init__(self, target: Target, file: DraftFile, texts: Mapping[str, Texts]) -> None:
        self.target, self.file, self.texts = target, file, next(iter(texts.values()))
        self.config = file.config.fit(target.config)
        weights = read_weights(file, target.dtype)
        self.ids = file.ids
        self.params = bind(self.config, weights, target, file.ids)
        self.features = Features.of(target, self.texts)
        self.drafted = guesses(self.config, self.params, self.features.read(self.config), self.texts, STEPS)
        self.base = acceptance(self.drafted, self.texts, self.ids)
        self.measured = {name: self.base if t is self.texts else self._on(t) for name, t in texts.items()}

    def _on(self, texts: Texts) -> Acceptance:
        features = Features.of(self.target, texts).read(self.config)
        return acceptance(guesses(self.config, self.params, features, texts, STEPS), texts, self.ids)

    def try_(
        self,
        *,
        config: EagleConfig | None = None,
        params: EagleParams | None = None,
        features: jax.Array | None = None,
    ) -> Acceptance:
        """Acceptance with something changed."""
        config = config or self.config
        features = self.features.read(self.config) if features is None else features
        drafted = guesses(config, params or self.params, features, self.texts, STEPS)
        return acceptance(drafted, self.texts, self.ids)

    @property
    def healthy(self) -> bool:
        """Whether enough drafts are right that no fault can be hiding the others."""
        return self.base.rates[0] >= HEALTHY

    def judge(self, test: str, tried: Mapping[str, Acceptance], remedy: str, ok: str) -> Finding:
        """The finding of alternatives: a failure when the best of them beats the pair as it is."""
        if tried:
            name, best = max(tried.items(), key=lambda item: item[1].length)
            if best.beats(self.base):
                text = f"{name}: {best} of drafts 1, 2, ... are right, as configured {self.base}"
                return Finding(test, "fail", text, remedy)
        if self.healthy or not tried:
            return Finding(test, "pass", ok)
        return Finding(
            test, "unknown", f"{len(tried)} alternatives do no better than the {self.base} as configured"
        )


def diagnose(target: Target, file: DraftFile, texts: Mapping[str, Texts]) -> Report:
    """Every test on a draft checkpoint and its target; ``texts``: see ``Pair``.

    The basis is not checked while loading: that is one of the tests. Raises MismatchError for a draft that
    does not fit the target at all (widths, vocabulary), which needs no diagnosis.
    """
    pair = Pair(target, file, texts)
    findings = (
        tokenizer(target, file),
        aux_layers(pair),
        basis(pair),
        positions(pair),
        vocabulary(pair),
        template(pair),
        norms(pair),
    )
    return Report(findings, pair.measured)


def tokenizer(target: Target, file: DraftFile) -> Finding:
    """Do ids mean the same tokens to both? Decided by the tokenizer that the draft's folder ships."""
    own = draft_tokenizer(file.path)
    if target.tokenizer is None or own is None:
        lacking = (
            "the target has no tokenizer" if target.tokenizer is None else "the draft's folder ships none"
        )
        return Finding(
            "tokenizer", "unknown", f"{lacking}; both count {file.config.vocab_size} ids, which proves little"
        )
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
    config, layers = pair.config, pair.target.config.num_layers
    if config.version == 1:
        return Finding("aux_layers", "pass", "an EAGLE-1 draft reads the last state alone")
    wanted = [config.aux[::-1]]
    if config.num_aux <= 4:
        wanted += itertools.permutations(config.aux)
    wanted += [tuple(i + shift for i in config.aux) for shift in (-1, 1)]
    if config.num_aux == 3 and layers >= 6:
        wanted.append(default_boundaries(layers))
    tried = {
        f"boundaries {list(aux)}": pair.try_(features=pair.features.read(config, aux))
        for aux in wanted
        if tuple(aux) != config.aux and min(aux) >= 0 and max(aux) <= layers
    }
    return pair.judge(
        "aux_layers",
        tried,
        "load with aux=(...) or --aux, or --aux-convention block|boundary; or correct the ids in config.json",
        f"boundaries {list(config.aux)} do as well as any of {len(tried)} others",
    )


def basis(pair: Pair) -> Finding:
    """Is the draft in the target's basis? By ids, by geometry, and by turning it."""
    target, config, params = pair.target, pair.config, pair.params
    matrix = target.rotation
    ids = f"the target's basis is {target.basis}, the draft's {config.basis}"
    tables = compare_tables(params.weights["embed"], target.params["embed"]) if config.own_embedding else None
    remedy = f"`{align_command(str(pair.file.path), target, recover=matrix is None)}`"
    if config.basis is not None:
        remedy = "the draft was aligned twice, or to another target: start from the original draft"
    if config.basis is None and target.basis is None and tables is not None and tables.relation == "rotated":
        return Finding("basis", "fail", f"the target was rotated without saying so: {tables}", remedy)
    tried = {}
    if matrix is not None and config.basis is None:
        try:
            aligned = align_params(params, config, matrix)
        except EaglejaxError as error:
            # Exports of other tools lack the weight of the final norm, which this draft needs.
            ids += f"; aligning was not tried: {error}"
        else:
            tried["aligned to the target"] = pair.try_(params=aligned)
    if matrix is not None and config.basis is not None:
        once = FeatureAdapter(target=(jnp.asarray(matrix.matrix),) * max(config.num_aux, 1))
        tried["turned back once"] = pair.try_(params=dataclasses.replace(params, adapter=once))
    found = pair.judge("basis", tried, remedy, ids)
    if found.verdict == "fail":
        return found
    if config.basis != target.basis and not fits_any_folding(config, matrix) and not pair.healthy:
        return Finding("basis", "fail", ids, remedy)
    if pair.healthy or (tables is not None and tables.relation == "same"):
        return Finding("basis", "pass", ids if tables is None else f"{ids}; {tables}")
    if config.basis is None and _folded(target):
        ids += "; every norm of the target has weight 1, as after a rotation that folded them"
    return Finding("basis", "unknown", ids + ("" if tables is None else f"; {tables}"))


def _folded(target: Target) -> bool:
    plain = 0.0 if target.config.norm_offset else 1.0
    norms = [target.params["norm"], *(layer["attn_norm"] for layer in target.params["layers"])]
    return all(bool(jnp.all(x == plain)) for x in norms)


def positions(pair: Pair) -> Finding:
    """Is each token paired with the right feature, and are distances what the draft learnt?"""
    features = pair.features.read(pair.config)
    tried = {
        f"features moved by {shift:+d}": pair.try_(features=jnp.roll(features, -shift, 1))
        for shift in (-1, 1)
    }
    ropes = {
        "the target's rotary settings": pair.target.config.rope,
        **{
            f"rotary base {theta:g}": dataclasses.replace(pair.config.rope, theta=theta)
            for theta in (1e4, 5e5, 1e6)
        },
    }
    for name, rope in ropes.items():
        if rope != pair.config.rope:
            tried[name] = pair.try_(config=dataclasses.replace(pair.config, rope=rope))
    return pair.judge(
        "positions",
        tried,
        "correct rope_theta and rope_scaling in the draft's config.json; a draft that wants moved features "
        "was trained with another pairing of features and tokens: train it again",
        f"pairing and rotary base {pair.config.rope.theta:g} do as well as any of {len(tried)} others",
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
    """Are numbers finite, and do the draft's norms stand where it was trained with them?"""
    config = pair.config
    bad = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree_util.tree_leaves_with_path(pair.params.weights)
        if not bool(jnp.all(jnp.isfinite(leaf)))
    ]
    if bad:
        return Finding("norms", "fail", f"{bad[0]} holds NaN or infinite numbers", "the file is damaged")
    features = pair.features.read(config)
    dtype = pair.params.weights["fc"].dtype
    written = jnp.asarray(np.arange(features.shape[1]) < pair.texts.lengths[:, None])[:, :, None, None]
    if not bool(jnp.all(jnp.isfinite(jnp.where(written, features, 0).astype(dtype)))):
        return Finding(
            "norms", "fail", f"the target's features overflow {dtype}", "run the draft in bfloat16 or float32"
        )
    tried = {}
    for flags in _flag_changes(config):
        name = ", ".join(f"{k}={v}" for k, v in flags.items())
        tried[name] = pair.try_(config=dataclasses.replace(config, **flags))
    if config.version == 1:
        last = pair.features.boundary[:, :, -1:]
        tried["the state before the final norm"] = pair.try_(features=last)
    return pair.judge(
        "norms",
        tried,
        "set these in the draft's config.json",
        f"{dtype} holds every number; no other place of the norms does better",
    )


def _flag_changes(config: EagleConfig) -> list[dict[str, Any]]:
    if config.version == 1:
        return []
    changes: list[dict[str, Any]] = [{"norm_before_residual": not config.norm_before_residual}]
    if config.head_norm:
        changes.append({"feed_normed": not config.feed_normed})
        changes.append({"head_norm": False, "feed_normed": False})
    return changes
