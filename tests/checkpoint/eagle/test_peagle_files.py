"""P-EAGLE checkpoints as their producers write them, and those that are broken."""

from __future__ import annotations

import numpy as np
import pytest
from eagle_files import FLAT, H, V, convert, make, maps, midlayer, rename, save, speculators_config
from eagle_logits import logits

from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.report import report, rows
from eaglejax.drafts.files import opened
from eaglejax.drafts.registry import recognise
from eaglejax.errors import CheckpointError, ConfigError

MASK_ID = 7
MADE = make(layers=2)
MASK = np.random.default_rng(5).normal(size=3 * H).astype(np.float32)
VLLM = FLAT | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 2,
    "ptd_token_id": MASK_ID,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
}
SPECULATORS = speculators_config(
    architectures=["PEagleSpeculator"],
    speculators_model_type="peagle",
    mask_token_id=MASK_ID,
    embed_requires_grad=True,
    eagle_aux_hidden_state_layer_ids=[2, 3, 4],
)
SPECULATORS["speculators_config"] |= {
    "algorithm": "peagle",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
}
SPECULATORS["transformer_layer_config"]["num_hidden_layers"] = 2
EMBED = {"embed_tokens.weight": np.random.default_rng(6).normal(size=(V, H)).astype(np.float32)}


def published(form: str) -> tuple[dict[str, np.ndarray], dict]:
    """(tensors, config.json) of the one draft in a producer's form."""
    tensors = MADE.tensors | maps(MADE) | EMBED | {"mask_hidden": MASK.reshape(1, 1, -1)}
    if form == "vllm":
        return rename(tensors, midlayer) | {"mask_hidden": MASK.reshape(1, -1)}, VLLM
    if form == "specforge":
        other = {"architectures": ["PEagleDraftModel"], "mask_token_id": MASK_ID, "ptd_token_id": None}
        return tensors, VLLM | other
    if form == "nemo":
        other = {"mask_token_id": MASK_ID, "pard_token": MASK_ID, "ptd_token_id": None}
        return {f"model.{n}": x for n, x in tensors.items()}, VLLM | other
    return tensors, SPECULATORS


def test_every_form_is_the_same_draft(tmp_path):
    found = {}
    for form in ("vllm", "specforge", "nemo", "speculators"):
        folder = save(tmp_path / form, *published(form))
        assert recognise(opened(folder)).name == "EAGLE"
        found[form], config, file = logits(folder)
        assert (config.mask_id, config.num_layers, config.aux) == (MASK_ID, 2, (2, 3, 4))
        np.testing.assert_array_equal(read_weights(file, np.float32)["mask"], MASK)
        assert ("parallel", f"all tokens behind the first in one pass, as masks of token {MASK_ID}") in rows(
            report(file)
        )
    want = found["vllm"]
    for form in found:
        np.testing.assert_array_equal(found[form], want)
    # What stands for unknown features is in use, behind the first step alone.
    tensors, config = published("vllm")
    other = logits(save(tmp_path / "other", tensors | {"mask_hidden": -MASK.reshape(1, -1)}, config))[0]
    np.testing.assert_array_equal(other[0], want[0])
    assert np.abs(other[1] - want[1]).max() > 0.1


def test_what_is_written_comes_back(tmp_path):
    """O7: weights, token and count of the speculators form; forms without masks refuse."""
    folder = save(tmp_path / "it", *published("speculators"))
    want, _, file = logits(folder)
    own = convert(folder, tmp_path / "own", "eaglejax")
    back = convert(tmp_path / "own", tmp_path / "back", "speculators")
    for again in (own, back, convert(folder, tmp_path / "same", "speculators")):
        assert again.config == file.config
        np.testing.assert_array_equal(logits(again.path)[0], want)
    assert set(own.store.names()) == set(file.store.names())
    raw = read_draft(tmp_path / "same").raw
    assert (raw["speculators_model_type"], raw["mask_token_id"]) == ("peagle", MASK_ID)
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert opened(tmp_path / "same").tensors.shape("mask_hidden") == (1, 1, 3 * H)
    for form in ("safeailab", "sglang", "modelopt"):
        with pytest.raises(ConfigError, match=r"no place for .*masks of a draft that guesses in parallel"):
            convert(folder, tmp_path / "x", form)


def without(name: str):
    return lambda t: {n: x for n, x in t.items() if n != name}


BROKEN = {
    "a lost mask": (without("mask_hidden"), {}, "lacks mask_hidden.*ptd_token_id 7"),
    "no token": (None, {"ptd_token_id": None}, "holds mask_hidden, but config.json names no mask token"),
    "only said": (without("mask_hidden"), {"ptd_token_id": None, "parallel_drafting": True}, "lacks mask_h"),
    "two tokens": (None, {"mask_token_id": 8}, "several mask tokens"),
    "no id": (None, {"ptd_token_id": "7"}, "ptd_token_id is '7'; it must be the id of a token"),
    "beyond": (None, {"ptd_token_id": V}, f"mask token {V} is no row of an embedding of {V} tokens"),
    "switched off": (None, {"parallel_drafting": False}, "says parallel_drafting: false, but"),
    "another width": (
        lambda t: t | {"mask_hidden": np.zeros((1, 1, 2 * H), np.float32)},
        {},
        r"mask_hidden' has shape \(32,\), the configuration asks for \(48,\)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_are_refused_by_name(name, tmp_path):
    change, config, text = BROKEN[name]
    tensors, usual = published("vllm")
    folder = save(tmp_path / "it", change(tensors) if change else tensors, usual | config)
    with pytest.raises((CheckpointError, ConfigError), match=text):
        logits(folder)


def test_a_record_of_masks_is_missed_and_eagle1_has_none(tmp_path):
    out = convert(save(tmp_path / "it", *published("vllm")), tmp_path / "own", "eaglejax")
    tensors = {n: out.store.array(n) for n in out.store.names() if n != "mask_hidden"}
    with pytest.raises(CheckpointError, match=r"lacks mask_hidden.*eaglejax\.mask_id 7"):
        read_draft(save(tmp_path / "lost", tensors, out.raw))
    first = make(1, vd=V)
    config = {k: v for k, v in FLAT.items() if k != "draft_vocab_size"} | {"ptd_token_id": 1, "bias": True}
    config["architectures"] = ["EagleLlamaForCausalLM"]
    with pytest.raises(CheckpointError, match="an EAGLE-1 draft that guesses in parallel"):
        read_draft(save(tmp_path / "first", first.tensors, config))
