"""Laws 1 to 3 where rounds choose their widths by measured costs, which is how everybody decodes who asks for
nothing else: greedy texts, joint laws, and rows that do not feel what their batch mates made it choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_greedy
import test_law
import test_rows
from cases import CASES
from loop_tools import COLD, HOT, WARM

from eaglejax.speculate import costs
from eaglejax.speculate.adaptive import Adaptive

OPTIMISED = True

FAST, SLOW = (1.0, 1.01, 1.05, 1.1), (1.0, 1.2, 2.0, 3.0)
"""Costs by which wide rounds pay, and by which few do."""


def slowly(*names: str) -> list[Any]:
    """Cases that belong to `make test-all`."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set what rounds cost."""
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))

    def set_(seconds: tuple[float, ...]) -> None:
        def table(kind: costs.Kind, state: Any) -> costs.Costs:
            del state
            menu = kind.program.menu
            return costs.Costs(menu, seconds[: 1 + len(menu)], 1.0, 0.0, tmp_path / "none")

        monkeypatch.setattr(costs, "table", table)

    return set_


ADAPTIVE: dict[str, Any] = {"speculation": "adaptive", "widths": (1, 3, 8)}


@pytest.mark.parametrize("name", [*slowly("ngram", "draft_model"), "mixed", "eagle3_dynamic"])
def test_greedy_texts(name: str, cost: Any) -> None:
    chosen, rested = set(), 0
    for turn, seconds in enumerate((FAST, SLOW)):
        cost(seconds)
        for result in test_greedy.check(CASES[name], test_greedy.prompts(), turn=turn, **ADAPTIVE):
            chosen |= set(dict(result.stats.widths))
            rested += result.stats.rests
    assert len(chosen) > 1, "one width alone proves little"
    assert rested or name == "ngram"


@pytest.mark.parametrize("name", ["ngram", "eagle3_tree", *slowly("draft_model", "eagle3_dynamic")])
def test_rows_are_independent(name: str, cost: Any) -> None:
    """Other costs, other mates and other slots choose other widths, and no row's text is another."""
    case, settings = CASES[name], [HOT, COLD, WARM]
    cost(FAST)
    together = test_rows.tokens(case, [0, 1, 2], settings, **ADAPTIVE)
    assert test_rows.tokens(case, [2, 0, 1], settings, **ADAPTIVE) == [together[2], *together[:2]]
    assert test_rows.tokens(case, [0] * 3, settings, **ADAPTIVE) == [together[0]] * 3
    cost(SLOW)
    assert test_rows.tokens(case, [2, 1], settings, **ADAPTIVE) == together[:0:-1]
    assert test_rows.tokens(case, [0, 1, 2], settings, speculation="fixed") == together
    if not case.proposer.draws:
        assert test_rows.tokens(CASES["ar"], [0, 1, 2], settings) == together, "what plain decoding draws"


@pytest.mark.parametrize("name", ["eagle3_dynamic", "drawn_chain"])
def test_joint_law(name: str) -> None:
    """Chosen by scores and by what was accepted before; of drawn drafts by nothing that a token says of
    itself."""
    test_law.check(CASES[name], "token", ["temperature"], widths=(1, 2, 3), policy=Adaptive(patience=1))
