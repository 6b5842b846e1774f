"""Who is tested: every proposer, over every kind of target. One line here inherits the whole suite.

A proposer is a ``Case`` in ``PROPOSERS``; a kind of target, by what its layers keep of a token, is a
``Layers`` in ``LAYERS``. Every proposer runs over the plain target, and some over every kind; the rest of
the product, and what a case calls ``slow``, belongs to `make test-all`. ``JUDGING`` are cases whose rounds
judge parts of their drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import (
    BATCH,
    PLAIN,
    SEED,
    SMALL_VOCAB,
    Layers,
    greedy_texts,
    lively,
    prompts,
    small_config,
    tiny_config,
)
from networks import Rows, dflash, eagle, eagle_config, eagle_weights, medusa, mtp
from scripted import FromTables, Predicted, Scripted
from width_tools import Likely, Turns

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.cascade.proposer import Cascade
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.prediction import Prediction
from eaglejax.drafts.suffix.proposer import Suffix
from eaglejax.drafts.tree import DynamicTree, StaticTree, chain, from_choices
from eaglejax.kv_format import FORMATS
from eaglejax.models.config import LayerSpec
from eaglejax.models.target import Target
from eaglejax.nn.indexer import Indexer
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.recurrent import GatedDelta
from eaglejax.nn.rope import RopeConfig
from eaglejax.speculate import rounds
from eaglejax.speculate.widths import Widest, WidthPolicy

CHAIN_3 = from_choices([[0], [0, 0], [0, 0, 0]])
WIDE = from_choices([[0], [1], [2], [3]])
MIXED = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 1]])
TREE = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])


def nothing(*_: Any) -> None:
    """The params of a proposer without any."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A proposer over a kind of target; hashable.

    ``build(target)`` gives the proposer; ``weights(proposer, layers, small, texts, turn)`` its params, or
    what its requests bring, for rows that greedy decoding would write as ``texts`` (prompts included) over
    the target of ``layers``, the ``small`` one or the other; ``turn`` varies them without changing a shape.
    ``committed``: drafts and state follow from the committed text alone, not from the rounds that wrote it.
    ``widths``, ``policy``: what its rounds judge of their drafts, see ``Program``. ``omit``: names of test
    files (without ``test_``) that say nothing of it; ``slow``: of those whose tests of it are slow, "all" for
    all.
    """

    name: str
    build: Callable[[Target], Any]
    weights: Callable[[Any, Layers, bool, Rows, int], Any] = nothing
    committed: bool = True
    slow: frozenset[str] = frozenset()
    layers: Layers = PLAIN
    widths: tuple[int, ...] = ()
    policy: WidthPolicy = dataclasses.field(default_factory=Widest)
    omit: frozenset[str] = frozenset()

    @property
    def proposer(self) -> Any:
        """The proposer for texts."""
        return self.build(self.target)

    @property
    def target(self) -> Target:
        """The target for texts."""
        return self.layers.target()

    @property
    def judged(self) -> dict[str, Any]:
        """What its rounds judge, for ``Program`` and for options."""
        return {"widths": self.widths, "policy": self.policy}

    def program(self, **options: Any) -> rounds.Program:
        """What a round over the target for texts is compiled for."""
        return rounds.Program(self.target.config, self.proposer, **options, **self.judged)

    def params(self, texts: Rows, batch: int = BATCH, turn: int = 0) -> Any:
        """The proposer's params for rows that will be ``texts``, by turns if ``batch`` has more."""
        rows = [list(texts[i % len(texts)]) for i in range(batch)]
        return self.weights(self.proposer, self.layers, False, rows, turn)

    def small(self, text: Sequence[int]) -> tuple[Any, Any]:
        """Proposer and params over the small target, for one row."""
        proposer = self.build(self.layers.small_target())
        return proposer, self.weights(proposer, self.layers, True, [text], 0)

    def over(self, layers: Layers) -> Case:
        """The same proposer over another kind of target."""
        return dataclasses.replace(self, name=f"{self.name}-{layers.name}", layers=layers)

    def by_turns(self, *menu: int, quick: str = "") -> Case:
        """The same proposer in rounds of every width of ``menu`` in turn, behind two that do not draft.

        What three tokens are distributed like says nothing of them: the first two rounds rest. ``quick``:
        names of test files whose tests of it are not slow.
        """
        return self._judging("turns", menu, Turns(), LAW, quick)

    def by_score(self, *menu: int, quick: str = "") -> Case:
        """The same proposer in rounds whose width the scores of the drafts decide.

        As a policy looks at the whole batch, a sampled row's draws depend on its mates.
        """
        return self._judging("likely", menu, Likely(), frozenset({"rows"}), quick)

    def _judging(
        self, how: str, menu: tuple[int, ...], policy: WidthPolicy, omit: frozenset[str], quick: str
    ) -> Case:
        slow = frozenset({"greedy", "law", "state", "rows", "metrics"}) - set(quick.split())
        name = f"{self.name}-{how}"
        return dataclasses.replace(self, name=name, widths=menu, policy=policy, omit=omit, slow=slow)


def _which(text: Sequence[int], turn: int) -> int:
    """Varies with text and turn, not with the row's place in its batch."""
    return len(text) + sum(text[:3]) + turn


def edited(proposer: Prediction, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Predictions that are the text, or the text with insertions and deletions, or nothing."""
    del layers, small
    edits: list[Callable[[list[int]], list[int] | None]] = [
        lambda t: t,
        lambda t: [*t[:20], 1, 1, *t[20:]],
        lambda t: t[3:9] + t[14:],
        lambda t: None,
    ]
    return Predicted([edits[_which(t, turn) % 4](list(t)) for t in texts])


def mixed_parts(target: Target) -> Cascade:
    """A lookup beside a network and behind it, of whose nodes not all find room."""
    parts = (NGram(3, 3, 1), Eagle(eagle_config(3, target, 1), DynamicTree(3, 3, 8)))
    return Cascade(parts, size=9, branches=2)


def of_parts(proposer: Cascade, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """The network's."""
    return None, eagle_weights(proposer.parts[1], layers, small, texts, turn)


def suffix(target: Target) -> Suffix:
    """A store that holds what greedy decoding will answer, and what it will not."""
    small = target.config.vocab_size == SMALL_VOCAB
    proposer = (
        Suffix(size=5, length=3, places=3, window=64) if small else Suffix(size=9, places=3, window=160)
    )
    texts = (
        [(1, 0, 2, 1, 3), (4, 2, 1, 0, 4)]
        if small
        else [(*t[9:20], 1, *t[20:]) for t in greedy_texts(prompts())]
    )
    for text in texts:
        proposer.store.add(text)
    return proposer


def none_predicted(proposer: Any, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Nothing but what ``inputs`` gives for requests without predictions."""
    del proposer, layers, small, turn
    return Predicted([None] * len(texts))


def scripts(proposer: Scripted, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Every pattern of acceptance, through the first sibling, the last, and by turns."""
    del layers, small
    depth = proposer.depth
    accept = [[0], [1], [depth - 1], [depth], [0, depth], [depth, 0, 1, depth - 1]]
    rows = [(accept[_which(t, BATCH * turn) % len(accept)] * 12)[:12] for t in texts]
    return proposer.script(texts, rows, ("last", "alternate", "first")[turn % 3])


def drawn(proposer: FromTables, layers: Layers, small: bool, texts: Rows, turn: int) -> jax.Array:
    """Tables of three positions; in the small one a token is certain to be refused in places."""
    del texts
    target = layers.small_target() if small else layers.target()
    size = target.config.vocab_size if proposer.ids is None else len(proposer.ids)
    rng = np.random.default_rng([turn, size])
    return jnp.asarray(np.log(rng.dirichlet(np.full(size, 0.7), 3)), jnp.float32)


def itself(proposer: DraftModel, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """The target's own weights at turn 0, others of its kind after that."""
    del texts
    target = layers.small_target() if small else layers.target()
    return target.params if turn == 0 else lively(target.config, SEED + turn)


def stranger(target: Target) -> DraftModel:
    """A draft of another vocabulary, geometry and window than the target's, made for shorter texts (A26,
    A82)."""
    vocab = target.config.vocab_size
    config = small_config(vocab_size=vocab - 1, num_heads=1, layers=(), max_position=6, intermediate_size=16)
    return DraftModel(config, length=2, vocab_size=vocab)


def strange(proposer: DraftModel, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Random weights."""
    del layers, small, texts
    return lively(proposer.config, 4 + turn, 12.0)


def tree_of(tree: StaticTree) -> dict[str, Any]:
    """A scripted proposer over ``tree``."""
    return {
        "build": lambda target: Scripted(tree, target.config.vocab_size),
        "weights": scripts,
        "committed": False,
    }


def from_tables(tree: StaticTree, **options: Any) -> dict[str, Any]:
    """Drafts drawn from known tables."""
    return {"build": lambda target: FromTables(tree, **options), "weights": drawn}


ALL = frozenset({"all"})
LAW = frozenset({"law"})
"""Its distribution is that of other cases, or of little interest."""
ROWS = frozenset({"rows", "state"})
"""What it does beside sampled rows is what another case of fixed guesses does."""

PROPOSERS = [
    Case("ar", lambda target: Autoregressive(), slow=LAW | ROWS),
    Case("ngram", lambda target: NGram(length=4, max_ngram=3)),
    Case("ngram_tree", lambda target: NGram(3, 3, 1, candidates=3, size=7), slow=LAW | ROWS),
    Case("suffix", suffix, none_predicted, slow=ROWS | {"metrics"}),
    Case("prediction", lambda target: Prediction(length=4), edited, committed=False, slow=ROWS),
    Case("draft_model", lambda target: DraftModel(target.config, length=2), itself, slow=LAW),
    Case("other_model", stranger, strange, slow=ROWS | LAW | {"greedy", "metrics"}),
    Case("narrow_model", lambda t: DraftModel(t.config, length=2, cache_dtype="rotor4"), itself, slow=ALL),
    Case(
        "eagle1_chain",
        **eagle(1, chain(3), sample=True, temperature=0.7, min_confidence=0.1),
        slow=LAW | {"rows"},
    ),
    Case("eagle1_tree", **eagle(1, TREE), slow=ALL),
    Case("eagle1_dynamic", **eagle(1, DynamicTree(3, 3, 8)), slow=ALL),
    Case("eagle3_chain", **eagle(3, chain(2), sample=True), slow=ALL),
    Case("eagle3_tree", **eagle(3, TREE, 1, sample=True)),
    Case("eagle3_dynamic", **eagle(3, DynamicTree(3, 3, 8), 1), slow=LAW | {"rows"}),
    Case("peagle_chain", **eagle(3, chain(3), 1, 2, sample=True), slow=LAW | {"greedy", "rows", "metrics"}),
    Case("peagle_dynamic", **eagle(3, DynamicTree(2, 3, 8), mask_id=0), slow=ALL),
    Case("cascade", mixed_parts, of_parts, committed=False, slow=LAW | ROWS | {"metrics"}),
    Case("medusa_tree", **medusa(TREE, sample=True), slow=LAW | {"rows"}),
    Case("medusa_chain", **medusa(chain(3), min_confidence=0.05), slow=ALL),
    Case("narrow_eagle", **eagle(3, chain(2), cache_dtype="int8"), slow=ALL),
    Case("mtp_chain", **mtp(1, chain(3), sample=True)),
    Case("mtp_dynamic", **mtp(2, DynamicTree(2, 3, 8)), slow=LAW | ROWS),
    Case("mtp_tree", **mtp(3, TREE, sample=True), slow=ALL),
    Case("dflash_chain", **dflash(chain(3), sample=True), slow=frozenset({"rows"})),
    Case("dflash_dynamic", **dflash(DynamicTree(2, 3, 8)), slow=ALL),
    Case("drawn_tree", **from_tables(TREE), slow=ALL),
    Case("drawn_again", **from_tables(TREE, replacement=True), slow=ALL),
    Case("drawn_few", **from_tables(TREE, ids=(0, 2, 3)), slow=ALL),
    Case("drawn_chain", **from_tables(chain(2)), slow=ALL),
    Case("chain_1", **tree_of(chain(1)), slow=ALL),
    Case("chain_3", **tree_of(CHAIN_3), slow=ALL),
    Case("chain_5", **tree_of(chain(5)), slow=ALL),
    Case("wide", **tree_of(WIDE), slow=ALL),
    Case("mixed", **tree_of(MIXED), slow=LAW),
]
"""Every proposer, one line each."""

CASES = {case.name: case for case in PROPOSERS}
"""Those over the plain target, by name, for tests of what is special about one of them."""

JUDGING = [
    CASES["mixed"].by_turns(1, 4, 16, quick="greedy metrics state"),
    CASES["ngram"].by_turns(2, 3),
    CASES["draft_model"].by_turns(1, 2, 3),
    CASES["eagle1_chain"].by_turns(1, 2, 4),
    CASES["eagle3_dynamic"].by_turns(1, 4, 16),
    CASES["eagle3_dynamic"].by_score(1, 4, 16),
    CASES["eagle1_chain"].by_score(2, 3, 4),
    CASES["eagle3_tree"].by_score(4, 6, 16, quick="law"),
]
"""Rounds that judge parts of their drafts, or do not draft at all, one line each."""

LATENT = LatentAttention(4, 6, 4, 5, 8, scale=10**-0.5, rope=RopeConfig(theta=100.0), query_rank=7)
DELTA = GatedDelta(key_heads=2, heads=4, key_dim=6, value_dim=5, kernel=3)


def made_of(*mixers: Any) -> dict[str, Any]:
    """A target whose layers meet by ``mixers`` (None: grouped-query attention with a window)."""
    layers = tuple(LayerSpec(window=11) if m is None else LayerSpec(mixer=m) for m in mixers)
    return {
        name: functools.partial(build, num_layers=len(layers), layers=layers)
        for name, build in (("tiny", tiny_config), ("small", small_config))
    }


EXPERTS = MoeConfig(
    4,
    2,
    12,
    scores="sigmoid",
    normalize=True,
    correction=True,
    groups=2,
    group_best=2,
    shared=8,
    shared_gate=True,
)
PARTS = {
    "attention_sinks": True,
    "attention_gate": True,
    "qk_norm": True,
    "qk_norm_whole": True,
    "sandwich_norms": True,
    "pre_norm": False,
    "residual_scale": 0.7,
    "logits_scaling": 0.5,
    "num_layers": 2,
    "layers": (LayerSpec(window=11, moe=EXPERTS), LayerSpec(rotary=False)),
}
"""What families of grouped-query attention have besides, all at once."""

LAYERS = [
    PLAIN,
    Layers("parts", functools.partial(tiny_config, **PARTS), functools.partial(small_config, **PARTS)),
    Layers("latent", **made_of(LATENT, None)),
    Layers("latent-int8", **made_of(LATENT, None), cache="int8"),
    Layers("sparse", **made_of(dataclasses.replace(LATENT, indexer=Indexer(16, 6, 5, 4)), None)),
    Layers("recurrent", **made_of(DELTA, None)),
    *(Layers(name, cache=name) for name in FORMATS if name != "float32"),
]
"""Every kind of thing that a target's layers keep, one line each."""

QUICK = {("mixed", "latent"), ("mixed", "recurrent")}
"""Pairs of a proposer and another kind than the plain one whose state `make test` looks at."""


FEW = ("ngram", "eagle3_tree", "mixed")
"""Proposers over the plain target whose further tests of a file `make test` runs."""


def every(name: str) -> Any:
    """Parametrises a test of the file ``test_<name>.py`` by the product; see the module's text."""
    return pytest.mark.parametrize("case", list(_cases(name)))


def few(name: str) -> Any:
    """As ``every``, and all but ``FEW`` are slow."""
    slow = {"marks": pytest.mark.slow}
    found = [p if p.id in FEW else pytest.param(*p.values, id=p.id, **slow) for p in _cases(name)]
    return pytest.mark.parametrize("case", found)


def _cases(name: str) -> Iterator[Any]:
    for case in PROPOSERS + JUDGING:
        if name in case.omit:
            continue
        for layers in LAYERS if case in PROPOSERS else [PLAIN]:
            if layers == PLAIN:
                full, slow = case, bool(case.slow & {"all", name})
            else:
                full, slow = case.over(layers), (case.name, layers.name) not in QUICK or name != "state"
            yield pytest.param(full, id=full.name, marks=pytest.mark.slow if slow else ())
