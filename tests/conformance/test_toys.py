"""A family of drafts, a kind of layer cache and a family of targets that are made in this file join the
conformance suite with one line each, and nothing else of the project knows them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_greedy
import test_law
import test_metrics
import test_rows
import test_state
from cases import CASES, Case, Rows
from loop_tools import CONTEXT, Layers, greedy_texts, prompts, small_config, tiny_config
from safetensors.numpy import save_file

from eaglejax import pytree, sampling
from eaglejax.drafts.base import Bound, Draft, Observation, Proposal
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.registry import load_draft, registered
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.models import families
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.cache import Placement, put_row
from eaglejax.nn.linear import linear
from eaglejax.pytree import ArrayInfo
from eaglejax.sampling import RowSampling


@dataclasses.dataclass(frozen=True)
class Bigram(OnChain[jax.Array, tuple[()]]):
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


@pytree.dataclass
class Total:
    """A memory of one vector a row: ``total`` [B, H] f32 of all committed tokens' values; ``written`` [B, N,
    H]: those of the tokens written last, until they are committed."""

    total: jax.Array
    written: jax.Array | None = None

    @property
    def capacity(self) -> None:
        return None

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> Total:
        new = self.written
        if path is not None:
            new = jnp.take_along_axis(new, path[:, :, None], axis=1)
        real = jnp.arange(new.shape[1]) < kept[:, None]
        return Total(self.total + jnp.where(real[:, :, None], new, 0).sum(1))

    def insert(self, slot: jax.Array, other: Total, row: jax.Array) -> Total:
        return Total(put_row(self.total, slot, other.total, row))

    def release(self, slot: jax.Array) -> Total:
        return Total(self.total.at[slot].set(0))


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mixer: each token reads the mean of the values of those before it and its own."""

    def table(self, wide: int, hidden: int, norm: Any, dtype: Any) -> dict[str, Any]:
        return {
            "v": ArrayInfo((wide, hidden), dtype, ("embed", None)),
            "o": ArrayInfo((hidden, hidden), dtype, (None, "embed")),
        }

    def cache_table(self, batch: int, capacity: int, kv_form: Any) -> Total:
        return Total(ArrayInfo((batch, MEAN_WIDTH), jnp.float32, ("batch", None)))

    def __call__(
        self, weights: Any, y: jax.Array, angles: Any, norm: Any, memory: Total, at: Placement
    ) -> tuple[jax.Array, Total]:
        value = linear(y, weights["v"])
        seen = at.visible.new(y.shape[1], at.lengths).astype(jnp.float32)
        total = memory.total[:, None] + jnp.einsum("bnm,bmh->bnh", seen, value)
        mean = total / (at.lengths[:, None] + seen.sum(-1))[:, :, None]
        return linear(mean, weights["o"]), Total(memory.total, value)


MEAN_WIDTH = 16


def mean_layers(build: Callable[..., ModelConfig]) -> Callable[[], ModelConfig]:
    """A model of full attention whose last layer reads means."""
    return functools.partial(
        build, hidden_size=MEAN_WIDTH, num_layers=2, layers=(LayerSpec(), LayerSpec(mixer=Mean()))
    )


@functools.cache
def toy_family(vocab_size: int) -> ModelConfig:
    """A ``model_type`` of this file, read from a config.json like any other."""
    toy = families.Family(
        defaults={"hidden_act": "gelu"},
        layers=lambda read, count, context: (LayerSpec(window=read.integer("toy_window")),) * count,
        fields=lambda read: {"final_softcap": 20.0, "qk_norm": True},
    )
    # Other tests list the families.
    with mock.patch.dict(families.FAMILIES):
        families.register("toy", toy)
        return families.from_hf(TOY_CONFIG | {"vocab_size": vocab_size})


TOY_CONFIG = {
    "model_type": "toy",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "toy_window": 9,
}


TOYS = [
    Case("toy_draft", lambda target: Bigram(), bigram),
    CASES["mixed"].over(Layers("toy_cache", mean_layers(tiny_config), mean_layers(small_config))),
    CASES["mixed"].over(Layers("toy_family", lambda: toy_family(32), lambda: toy_family(5))),
]
"""One line each."""

SUITE = [
    test
    for module in (test_greedy, test_state, test_rows, test_metrics, test_law)
    for name, test in vars(module).items()
    if name.startswith("test_") and "case" in test.__annotations__
]
QUICK = (
    test_greedy.test_to_the_end_of_the_context,
    test_state.test_every_round_leaves_the_state_of_the_committed_text,
)
ON_CHAINS = (test_law.test_joint_law_of_block_verification,)


@pytest.fixture
def optimised_as_in_its_module(test: Callable[[Case], None]) -> Iterator[None]:
    """Compiles as the module that ``test`` comes from asks for."""
    before = jax.config.read("jax_disable_most_optimizations")
    plain = not getattr(sys.modules[test.__module__], "OPTIMISED", False)
    jax.config.update("jax_disable_most_optimizations", before and plain)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimised_as_in_its_module")
@pytest.mark.parametrize(
    ("test", "case"),
    [
        pytest.param(
            test, case, id=f"{test.__name__}-{case.name}", marks=() if test in QUICK else pytest.mark.slow
        )
        for test in SUITE
        for case in TOYS
        if test not in ON_CHAINS or case.proposer.chain
    ],
)
def test_a_toy_passes_the_suite(test: Callable[[Case], None], case: Case) -> None:
    test(case)
