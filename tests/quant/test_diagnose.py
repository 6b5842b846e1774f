"""Each fault of a pair is found by its own test and by no other, on a tiny pair into which it was planted."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from tiny_model import TEMPLATE, byte_tokenizer

from eaglejax.checkpoint.tokenizer import load_tokenizer
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle.align_file import align_file, write_aligned
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.measure import suspects as tests
from eaglejax.measure.diagnose import _verdict, diagnose
from eaglejax.measure.pair import Pair
from eaglejax.measure.quality import Acceptance, Texts
from eaglejax.rotation.basis import UNKNOWN_ROTATION, Basis
from eaglejax.rotation.rotate import Rotation, rotate_target

H, V = 16, 24


@functools.cache
def rotated():
    return rotate_target(tiny_pair.target(), Rotation("random", H, seed=4))


def folder(at: Path, which: str = "eagle3", *, own_embedding: bool = False, head=None, **changes) -> Path:
    """The trained draft as a checkpoint, perhaps with a changed head or setting."""
    config, params = tiny_pair.draft(which)
    weights = dict(params.weights)
    if own_embedding:
        weights["embed"], changes = tiny_pair.target().params["embed"], changes | {"own_embedding": True}
    if head is not None:
        weights["head"] = head(weights["head"])
    config = dataclasses.replace(config, **changes)
    write_draft(at, config, tensors_of_weights(config, weights), None, to="eaglejax")
    return at


def verdicts(report) -> dict[str, str]:
    return {f.test: f.verdict for f in report.findings}


def test_a_sound_pair_has_no_fault(tmp_path):
    for which in tiny_pair.VERSIONS:
        report = diagnose(
            tiny_pair.target(), read_draft(folder(tmp_path / which, which)), {"plain": tiny_pair.written()}
        )
        assert report.measured["plain"].rates[0] > 0.7
        want = dict.fromkeys(("aux_layers", "basis", "positions", "vocabulary", "norms"), "pass")
        assert verdicts(report) == want | {"tokenizer": "unknown", "template": "unknown"}


def plant_aux_order(at):
    return tiny_pair.target(), read_draft(folder(at), aux=(3, 1, 2))


def plant_moved_features(at):
    """Trained with each token beside the feature of the token after it."""
    config, params = tiny_pair.train(
        tiny_pair.config("eagle3"), tiny_pair.target(), np.asarray(tiny_pair.texts()), shift=1
    )
    write_draft(at, config, tensors_of_weights(config, params.weights), None, to="eaglejax")
    return tiny_pair.target(), read_draft(at)


def plant_rotation(at):
    return rotated(), read_draft(folder(at))


def plant_silent_rotation(at):
    return dataclasses.replace(rotated(), basis=None, rotation=None), read_draft(
        folder(at, own_embedding=True)
    )


def plant_second_alignment(at):
    """Aligned, its record taken out, and aligned once more."""
    for n in range(2):
        file = read_draft(folder(at / "0") if n == 0 else at / "1")
        write_aligned(at / str(n + 1), align_file(file, rotated(), rotated().rotation), file)
        if n == 0:
            config = json.loads((at / "1/config.json").read_text())
            del config["eaglejax"]["basis"]
            (at / "1/config.json").write_text(json.dumps(config))
    return rotated(), read_draft(at / "2")


def plant_permuted_vocabulary(at):
    order = np.random.default_rng(0).permutation(V)
    return tiny_pair.target(), read_draft(folder(at, head=lambda head: head[:, order]))


def plant_norm(at):
    flipped = not tiny_pair.config("eagle3").norm_before_residual
    return tiny_pair.target(), read_draft(folder(at, norm_before_residual=flipped))


PLANTS = {
    "aux_layers": [plant_aux_order],
    "positions": [plant_moved_features],
    "basis": [plant_rotation, plant_silent_rotation, plant_second_alignment],
    "vocabulary": [plant_permuted_vocabulary],
    "norms": [plant_norm],
}
SLOW = (plant_silent_rotation, plant_second_alignment)


@pytest.mark.parametrize(
    ("test", "plant"),
    [
        pytest.param(t, p, marks=[pytest.mark.slow] if p in SLOW else [])
        for t, plants in PLANTS.items()
        for p in plants
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_planted_fault_is_found_by_its_own_test(test, plant, tmp_path):
    target, file = plant(tmp_path / "draft")
    report = diagnose(target, file, {"plain": tiny_pair.written()})
    assert report.measured["plain"].length < 2, "the fault costs nothing here"
    assert [f.test for f in report.faults] == [test], report.findings
    assert report.faults[0].remedy


def test_norms_folded_without_a_turn_are_no_fault_of_a_weak_draft(tmp_path):
    """The draft reads boundaries and has a head of its own, so that folding concerns it in nothing."""
    folded = rotate_target(tiny_pair.target(), Rotation("identity", H))
    file = read_draft(folder(tmp_path / "draft", head=lambda head: head * 0))
    pair = Pair(folded, file, {"plain": tiny_pair.written()})
    assert not pair.healthy
    assert tests.basis(pair).verdict != "fail"
    assert tests.basis(as_of(pair, rotated())).verdict == "fail"


def test_a_basis_that_cannot_be_tried_is_named_with_the_command_that_can(tmp_path):
    """The tool exported the matrix without the final norm's weight, or neither."""
    file = read_draft(folder(tmp_path / "a draft", "eagle1"))
    pair = Pair(rotated(), file, {"plain": tiny_pair.written()})
    half = dataclasses.replace(rotated(), rotation=Basis(rotated().rotation.matrix, None))
    found = tests.basis(as_of(pair, half))
    assert found.verdict == "fail"
    assert "not tried: the rotation was exported without the weight of the final norm" in found.evidence
    lost = dataclasses.replace(rotated(), rotation=None, basis=UNKNOWN_ROTATION)
    found = tests.basis(as_of(pair, lost))
    assert found.verdict == "fail"
    assert f"--draft '{file.path}' --target" in found.remedy
    assert "--method procrustes --original-target T0" in found.remedy
    pair.config = dataclasses.replace(pair.config, basis=rotated().basis)
    found = tests.basis(as_of(pair, tiny_pair.target()))
    assert found.verdict == "fail"
    assert "start from the original draft" in found.remedy


def as_of(pair, target):
    """The same measurements, as of another target."""
    pair.target = target
    return pair


def test_a_rotation_is_mended_by_the_command_that_is_named(tmp_path):
    target, file = plant_rotation(tmp_path / "draft")
    found = diagnose(target, file, {"plain": tiny_pair.written()}).faults[0]
    assert f"eaglejax align --draft {file.path} --target" in found.remedy
    out = tmp_path / "aligned"
    write_aligned(out, align_file(file, target, target.rotation), file)
    assert not diagnose(target, read_draft(out), {"plain": tiny_pair.written()}).faults


def test_another_tokenizer_is_found_in_the_drafts_folder(tmp_path):
    def tokenizer(at, extra=()):
        at.mkdir(parents=True, exist_ok=True)
        backend = byte_tokenizer()
        backend.add_tokens(list(extra))
        backend.save(str(at / "tokenizer.json"))
        (at / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE})
        )
        return load_tokenizer(at)

    draft = folder(tmp_path / "draft")
    target = dataclasses.replace(tiny_pair.target(), tokenizer=tokenizer(tmp_path / "target"))
    assert tests.tokenizer(target, read_draft(draft)).verdict == "unknown"
    tokenizer(draft)
    assert tests.tokenizer(target, read_draft(draft)).verdict == "pass"
    tokenizer(draft, extra=["<other>"])
    found = tests.tokenizer(target, read_draft(draft))
    assert found.verdict == "fail"
    assert "'<other>' to the draft and None to the target" in found.evidence


def test_another_template_is_found_in_the_folder_or_by_what_suits_the_draft(tmp_path):
    """The draft knows its texts by heart; as "chat" prompts it meets texts that it has never seen."""
    prompts = [[(7 * i + 5 * j + 2) % V for j in range(5)] for i in range(6)]
    answers, _ = tiny_pair.decode(tiny_pair.target(), Autoregressive(), None, prompts)
    strange = Texts.of(list(zip(prompts, answers, strict=True)))
    draft = folder(tmp_path / "draft")
    pair = Pair(tiny_pair.target(), read_draft(draft), {"chat": strange, "plain": tiny_pair.written()})
    found = tests.template(pair)
    assert found.verdict == "fail"
    assert found.evidence.startswith("on plain prompts")
    usual = Pair(tiny_pair.target(), read_draft(draft), {"plain": tiny_pair.written(), "chat": strange})
    assert tests.template(usual).verdict == "pass"

    @dataclasses.dataclass
    class Template:
        chat_template: str

    for shipped, verdict in ((TEMPLATE, "pass"), ("{{ messages }}", "fail")):
        (draft / "tokenizer_config.json").write_text(json.dumps({"chat_template": shipped}))
        usual.target = dataclasses.replace(usual.target, tokenizer=Template(TEMPLATE))
        assert tests.template(usual).verdict == verdict


def test_numbers_that_no_dtype_holds_are_found(tmp_path):
    at = folder(tmp_path / "nan", head=lambda head: head.at[0, 0].set(jnp.nan))
    pair = Pair(tiny_pair.target(), read_draft(at), {"plain": tiny_pair.written()})
    found = tests.norms(pair)
    assert (found.verdict, found.evidence) == ("fail", "head holds NaN or infinite numbers")
    pair = Pair(tiny_pair.target(), read_draft(folder(tmp_path / "half")), {"plain": tiny_pair.written()})
    pair.params = dataclasses.replace(
        pair.params, weights=jax.tree.map(lambda x: x.astype(jnp.float16), pair.params.weights)
    )
    pair.features = dataclasses.replace(pair.features, boundary=pair.features.boundary * 1e6)
    assert "overflow float16" in tests.norms(pair).evidence


def test_a_vocabulary_that_leaves_out_the_text_is_found_by_count(tmp_path):
    config, params = tiny_pair.draft("eagle3")
    rare = np.argsort(np.bincount(tiny_pair.written().tokens.ravel(), minlength=V), kind="stable")[:8]
    ids = np.sort(rare)
    config = dataclasses.replace(config, draft_vocab_size=8)
    weights = params.weights | {"head": params.weights["head"][:, ids]}
    write_draft(tmp_path / "d", config, tensors_of_weights(config, weights), ids, to="eaglejax")
    pair = Pair(tiny_pair.target(), read_draft(tmp_path / "d"), {"plain": tiny_pair.written()})
    found = tests.vocabulary(pair)
    assert found.verdict == "fail"
    assert "8 of 24 ids hold" in found.evidence


def test_better_means_better_beyond_chance():
    few, many = (0.5, 0.3), (0.35, 0.2)
    assert Acceptance(few, 200).beats(Acceptance((0.2, 0.1), 200))
    assert not Acceptance(few, 30).beats(Acceptance(many, 30))
    assert not Acceptance((0.5, 0.1), 10_000).beats(Acceptance((0.35, 0.25), 10_000))


def silent():
    """Rotated, with flags and matrix removed."""
    return dataclasses.replace(rotated(), basis=None, rotation=None)


def test_the_original_measures_a_rotation_that_nothing_else_shows(tmp_path):
    """The draft has no embedding of its own, so that there are no two tables to compare."""
    file = read_draft(folder(tmp_path / "d"))
    pair = Pair(silent(), file, {"plain": tiny_pair.written()})
    blind = tests.basis(pair)
    assert blind.verdict == "unknown"
    assert "--original-target" in blind.evidence
    found = tests.basis(pair, tiny_pair.target())
    assert found.verdict == "fail"
    assert "aligned by the rotation" in found.evidence
    assert "--method procrustes --original-target" in found.remedy
    beside = tests.of_another_target(pair, tiny_pair.target(), pair.texts)
    assert beside.verdict == "unknown", "one model, rotated: the basis test names it"
    assert _verdict(pair, [blind, found, beside], True) == "rotation"
    assert _verdict(pair, [blind], False) == "unknown"
    assert _verdict(pair, [blind], True) == "not this draft's text"


def test_the_original_shows_another_target(tmp_path):
    changed = dict(tiny_pair.target().params)
    order = np.random.default_rng(1).permutation(V)
    changed["embed"] = changed["embed"][order] * 3
    other = dataclasses.replace(tiny_pair.target(), params=changed)
    pair = Pair(other, read_draft(folder(tmp_path / "d")), {"plain": tiny_pair.written()})
    found = tests.of_another_target(pair, tiny_pair.target(), tiny_pair.written())
    assert found.verdict == "fail"
    assert "no rotation takes" in found.evidence
    assert _verdict(pair, [found], True) == "wrong target"


def test_a_norm_that_lies_unused_in_the_file_is_tried_with_its_weight(tmp_path):
    """The draft's config switches the head's norm off, although its weight is there."""
    at = folder(tmp_path / "d")
    config = json.loads((at / "config.json").read_text())
    config["eaglejax"] |= {"head_norm": False, "feed_normed": False}
    (at / "config.json").write_text(json.dumps(config))
    pair = Pair(tiny_pair.target(), read_draft(at), {"plain": tiny_pair.written()})
    tried = dict(pair.probe.norm_choices((pair.config, pair.params), pair.file))
    assert "head_norm=True, feed_normed=False" in tried
    _, params = tried["head_norm=True, feed_normed=False"]
    np.testing.assert_array_equal(params.weights["norm"], tiny_pair.draft("eagle3")[1].weights["norm"])
    names = set(tried)
    assert f"norm_before_residual={not pair.config.norm_before_residual}" in names
    assert {"aux_norm=none", "aux_norm=joined"} <= names


def test_what_a_config_leaves_open_is_tried_as_the_target_has_it(tmp_path):
    """A window without a word of which layers slide, and an activation that is not the target's."""
    at = folder(tmp_path / "d", activation="gelu")
    config = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(config | {"sliding_window": 7}))
    pair = Pair(tiny_pair.target(), read_draft(at), {"plain": tiny_pair.written()})
    tried = dict(pair.probe.part_choices((pair.config, pair.params), pair.file, pair.target))
    assert tried["a window of 7 in every layer"][0].windows == (7,)
    activation = tiny_pair.target().config.activation
    assert tried[f"activation={activation}"][0].activation == activation
