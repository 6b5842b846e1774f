"""A draft model and its target are each read as their own files say, quantised or not."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from tiny_model import write_model

from eaglejax.api import generate
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.checkpoint.target import load_target
from eaglejax.drafts.draft_model.load import load_draft_model
from eaglejax.quant.array import QuantArray
from eaglejax.quant.quantize import quantize_target

PROMPT = [[40, 41, 42, 43, 44]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, as it is and in int8."""
    root = tmp_path_factory.mktemp("models")
    plain, packed = Path(write_model(root / "float")), root / "w8a8"
    write_quantized(quantize_target(load_target(plain, dtype="float32"), "w8a8"), packed)
    return {"float": plain, "w8a8": packed}


@pytest.mark.parametrize(("target", "draft"), [("w8a8", "float"), ("float", "w8a8")])
def test_a_quantised_model_makes_its_partner_neither_quantised_nor_float(folders, target, draft) -> None:
    """A59: the text is the target's, and the draft's weights are those of its folder: being the same model
    but for int8, it guesses well."""
    model = load_target(folders[target], dtype="float32")
    bound = load_draft_model(folders[draft], model, length=3)
    for params, name in ((model.params, target), (bound.params, draft)):
        leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantArray))
        assert any(isinstance(x, QuantArray) for x in leaves) == (name == "w8a8")
    (fast,) = generate(model, PROMPT, proposer=bound, max_new_tokens=24)
    (plain,) = generate(model, PROMPT, max_new_tokens=24)
    assert fast.token_ids == plain.token_ids
    assert len({*plain.token_ids}) > 5, "a constant text would prove little"
    assert fast.stats.mean_acceptance_length > 2
