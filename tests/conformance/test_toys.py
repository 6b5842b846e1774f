"""A family of drafts that is made in this file joins the conformance suite with one line, and nothing else of
the project knows it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_greedy
import test_state
from cases import Case, Rows
from loop_tools import Layers, greedy_texts, prompts
from safetensors.numpy import save_file

from eaglejax import sampling
from eaglejax.drafts.base import Bound, Draft, Observation, Proposal
from eaglejax.drafts.family import DraftFamily, DraftMethod
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.registry import load_draft, registered
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.models.target import Target
from eaglejax.sampling import RowSampling


@dataclasses.dataclass(frozen=True)
class Bigram(OnChain):
    """Drafts a chain of ``length`` tokens, each by the one before it; params: logits [V, V]."""

    length: int = 2

    def init(self, params: Any, *, batch: int, capacity: int, inputs: Any = ()) -> tuple[()]:
        del params, batch, capacity, inputs
        return ()

    def observe(self, params: Any, state: tuple[()], seen: Observation) -> tuple[()]:
        del params, seen
        return state

    def propose(
        self,
        params: Any,
        state: tuple[()],
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, tuple[()]]:
        tokens, qs = [root], []
        for i in range(self.length):
            probs = sampling.distribution(params[tokens[-1]][:, None], rows)[:, 0]
            drawn = sampling.draw(probs, sampling.fold(keys, i)) if rows.sampled else probs.argmax(-1)
            qs.append(probs)
            tokens.append(drawn.astype(jnp.int32))
        count = jnp.full_like(lengths, self.length)
        q = jnp.stack([*qs, jnp.zeros_like(qs[0])], axis=1) if rows.sampled else None
        return chain_draft(root, jnp.stack(tokens[1:], axis=1), count, Proposal(q=q)), state


@dataclasses.dataclass(frozen=True)
class BigramFile:
    """A folder with a table."""

    path: Path
    table: np.ndarray
    config: None = None
    notes: tuple[str, ...] = ()


class BigramFamily(DraftFamily):
    """Folders whose config.json says ``"model_type": "bigram"``."""

    name: ClassVar[str] = "bigram"
    proposer: ClassVar[type] = Bigram
    file: ClassVar[type] = BigramFile
    methods: ClassVar[Mapping[str, DraftMethod]] = {"bigram": DraftMethod((), lambda config: {})}
    default: ClassVar[str] = "bigram"

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        return "model_type bigram" if raw.get("model_type") == "bigram" else None

    def shown(self, files: DraftFiles) -> bool:
        return False

    def read(self, files: DraftFiles, *, method: str = "auto", **reading: Any) -> BigramFile:
        return BigramFile(files.path, files.tensors.array("table"))

    def load(
        self,
        file: BigramFile,
        target: Target,
        *,
        dtype: Any = None,
        align: bool = False,
        draft: str = "",
        **options: Any,
    ) -> Bound:
        return Bound(Bigram(**options), jnp.asarray(file.table, dtype or jnp.float32))

    def check(self, bound: Bound, target: Target) -> None:
        """It reads nothing of its target."""


@functools.cache
def loaded(layers: Layers, small: bool, turn: int) -> Bound:
    """A draft from a folder, through the project's own loader."""
    target = layers.small_target() if small else layers.target()
    size = target.config.vocab_size
    with tempfile.TemporaryDirectory() as folder, registered(BigramFamily()):
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "bigram"}))
        logits = np.random.default_rng(turn).normal(0, 1, (size, size)).astype(np.float32)
        if not small and turn != 1:
            # It knows pairs of the greedy texts; where a token has several followers, the last one.
            pairs = {a: b for text in greedy_texts(prompts(), layers) for a, b in itertools.pairwise(text)}
            logits[list(pairs), list(pairs.values())] = 8
        save_file({"table": logits}, Path(folder) / "model.safetensors")
        return load_draft(folder, target)


def bigram(proposer: Any, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """The params of a loaded draft."""
    del texts
    bound = loaded(layers, small, turn)
    assert bound.proposer == proposer
    return bound.params


TOY = Case("toy_draft", lambda target: Bigram(), bigram)


@pytest.mark.parametrize(
    "test",
    [
        test_greedy.test_to_the_end_of_the_context,
        test_state.test_every_round_leaves_the_state_of_the_committed_text,
    ],
    ids=lambda test: test.__name__,
)
def test_a_toy_passes_the_suite(test: Callable[[Case], None]) -> None:
    test(TOY)
