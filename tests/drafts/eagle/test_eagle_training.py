"""What training computes of a draft that decoding accepts whole, and what a cast leaves in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import EAGLE1, EAGLE3, make
from eagle_loop import last_token_pair, make_target, own_layer_pair, target_config
from overfit import learnt

import eaglejax as ej
from eaglejax import pytree
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.train.batch import shift
from eaglejax.train.chain import trained_rows
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.features import with_features
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.packing import assemble
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, RunSettings, TrainSettings

PAIRS = {
    "eagle1": (own_layer_pair, Objective(algorithm="hass", steps=3)),
    "eagle3": (last_token_pair, Objective(steps=3)),
    "scaled-capped": (lambda: last_token_pair(embed_scale=4.0, softcap=5.0), Objective(steps=3)),
}


def text(length: int, seed: int) -> Sample:
    """Any text will do: the drafts compute what the target computes of it. The window of ``own_layer_pair``
    is full from the fifth token on."""
    ids = np.random.default_rng(seed).integers(0, 24, length).astype(np.int32)
    return Sample(ids, np.arange(length) >= 5, str(seed))


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_that_is_accepted_whole_is_right_in_every_trained_row(name):
    """Labels, tokens and positions of all steps are those of decoding, in packed rows, with an embedding that
    is scaled and logits that are capped too (A70, A73)."""
    build, objective = PAIRS[name]
    target, config, params = build()
    batch = with_features(target, assemble([text(19, 0), text(14, 1)], 40), config.aux)
    head = Head(target.params["head"], softcap=target.config.final_softcap)

    @jax.jit
    def measure(batch):
        rows = trained_rows(objective, head, batch)
        return objective_loss(params, config, objective, head, batch, rows)[1]

    found = measure(batch)
    assert min(found.judged) > 15
    np.testing.assert_array_equal(found.hits, found.judged)
    assert len({*np.asarray(batch.top)[0, :19].tolist()}) > 5, "a constant answer would prove little"
    if config.version == 3:
        np.testing.assert_allclose(found.accept, found.judged, rtol=1e-4)
    late = measure(dataclasses.replace(batch, hidden=shift(batch.hidden, 1), top=shift(batch.top, 1)))
    assert max(late.hits / late.judged) < 0.5


@pytest.mark.slow
def test_a_draft_that_learnt_a_text_by_hass_is_accepted_whole_on_it(tmp_path):
    """From HASS's loss to decoding, through a file: three tokens a round from states of its own."""
    target = make_target(target_config(num_layers=2), seed=3)
    objective = Objective(algorithm="hass", steps=3, step_decay=1.0, feature_weight=0.05, token_weight=1.0)
    settings = TrainSettings(
        out="x",
        objective=objective,
        draft=DraftSettings(start="random"),
        run=RunSettings(compute_dtype="float32"),
    )
    bound, prompt, text = learnt(target, settings, tmp_path / "it", tokens=21, updates=1000)
    assert bound.proposer.config.version == 1
    out = ej.generate(target, prompt, proposer=bound, max_new_tokens=len(text), ignore_eos=True)
    assert out.token_ids == text
    assert out.stats.num_drafts == -(-(len(text) - 1) // 4)


MIXTURE = dataclasses.replace(
    EAGLE3, num_experts=4, experts_per_token=2, moe_intermediate_size=12, intermediate_size=24
)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (EAGLE3, []),
        (MIXTURE, ["['layers'][0]['router']"]),
        (dataclasses.replace(EAGLE1, feature_map=True), ["['feature_map']"]),
    ],
    ids=["plain", "mixture", "aligned"],
)
def test_a_cast_follows_the_table(config, kept):
    """What the table always holds in float32 is not rounded on the way to half precision, all else is; a part
    of the weights, as a draft with an untrained head is, goes the same way."""
    weights = make(config).weights
    cast = eagle_model.cast(weights, config, jnp.bfloat16)
    table = pytree.abstract(eagle_model.param_table(config, jnp.bfloat16))
    assert jax.tree.map(lambda w: w.dtype, cast) == jax.tree.map(lambda i: i.dtype, table)
    pairs = zip(
        jax.tree_util.tree_flatten_with_path(weights)[0],
        jax.tree.leaves(cast),
        strict=True,
    )
    same = [jax.tree_util.keystr(p) for (p, a), b in pairs if np.array_equal(a, b.astype(jnp.float32))]
    assert same == kept
    part = eagle_model.cast({k: v for k, v in weights.items() if k != "head"}, config, "bfloat16")
    assert {k: v for k, v in cast.items() if k != "head"}.keys() == part.keys()
    assert part["fc"].dtype == jnp.bfloat16
