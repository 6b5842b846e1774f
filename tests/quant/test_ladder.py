"""What each piece of an alignment is worth, on drafts that are accepted almost whole before the rotation.

The text is plain decoding's on every rung: a wrong basis costs speed alone, which is why nobody notices.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from eaglejax.checkpoint.eagle import bind
from eaglejax.drafts.eagle import Eagle
from eaglejax.drafts.eagle_model import EagleParams
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.tree import chain
from eaglejax.quant.align import align_params
from eaglejax.quant.basis import Basis
from eaglejax.quant.rotate import Rotation, rotate_target

H, LENGTH = 16, 3


@functools.cache
def rotated():
    return rotate_target(tiny_pair.target(), Rotation("hadamard", H, seed=4))


def rung(name: str, which: str) -> EagleParams:
    """The draft ``which`` bound to the rotated target and mended as far as ``name`` says."""
    config, made = tiny_pair.draft(which)
    basis = rotated().rotation
    bound = bind(config, made.weights, rotated())
    wrong = Basis(basis.matrix.T.copy(), basis.gamma)
    if name == "original":
        return bind(config, made.weights, tiny_pair.target())
    if name == "unaligned":
        return bound
    if name == "features only":
        return align_params(bound, config, basis, parts=("features",))
    if name == "wrong orientation":
        return align_params(bound, config, wrong)
    if name == "gamma not divided":
        return align_params(bound, config, Basis(basis.matrix, np.ones_like(basis.gamma)))
    aligned = align_params(bound, config, basis)
    if name == "twice":
        twice = tuple(m @ m for m in aligned.adapter.target)
        return dataclasses.replace(aligned, adapter=FeatureAdapter(target=twice))
    assert name == "aligned"
    return aligned


def accepted(trace: list[list[int]]) -> float:
    """Drafts accepted a round, the first token and the last round (which the context cuts) left out."""
    counts = [n - 1 for row in trace for n in row[1:-1]]
    return sum(counts) / len(counts)


@functools.cache
def climb(name: str, which: str) -> tuple[list[list[int]], list[list[int]]]:
    config, _ = tiny_pair.draft(which)
    params = rung(name, which)
    if not params.adapter.target:
        # The same maps' places everywhere: one program for the whole ladder.
        same = (jnp.eye(H),) * max(config.num_aux, 1)
        params = dataclasses.replace(params, adapter=FeatureAdapter(target=same))
    if params.head is not None:
        params = dataclasses.replace(params, tied=False)
    target = tiny_pair.target() if name == "original" else rotated()
    return tiny_pair.decode(target, Eagle(config, chain(LENGTH)), params)


RUNGS = [
    "original",
    "unaligned",
    "features only",
    "wrong orientation",
    "twice",
    "gamma not divided",
    "aligned",
]


@pytest.mark.parametrize("which", tiny_pair.VERSIONS)
def test_the_ladder(which):
    plain = [list(t[len(p) :]) for p, t in zip(tiny_pair.PROMPTS, tiny_pair.texts(), strict=True)]
    rate = {}
    for name in RUNGS:
        tokens, trace = climb(name, which)
        assert tokens == plain, f"{name}: the text changed"
        rate[name] = accepted(trace)
    print(which, {k: round(v, 2) for k, v in rate.items()})
    assert rate["original"] > 2, "the draft is too weak to show anything"
    assert climb("aligned", which)[1] == climb("original", which)[1], "not the original accept trace"
    for name in ("unaligned", "wrong orientation", "twice"):
        assert rate[name] < 0.25 * rate["original"], name
    assert rate["features only"] < 0.5 * rate["original"]
    if which == "eagle1":
        assert rate["gamma not divided"] < 0.8 * rate["original"]
    else:
        # Boundaries lie before any norm, and this draft has a head of its own: gamma is none of its business.
        assert climb("gamma not divided", which)[1] == climb("original", which)[1]
