"""What a round costs: how it is measured, kept, trusted and foretold. No test here waits for a clock."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cases import CASES
from loop_tools import GREEDY, empty_state, prompts, tiny_target

from eaglejax.devices import chips
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.ngram import NGram
from eaglejax.speculate import costs
from eaglejax.speculate.adaptive import Adaptive
from eaglejax.speculate.costs import Costs, Kind
from eaglejax.speculate.state import DecodeState, Params, Program

MENU = (1, 4, 8)
SECONDS = (0.1, 0.11, 0.2, 0.3)
DAY = 86400.0


@pytest.fixture(autouse=True)
def now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which stands still unless a test moves it; tables are kept under ``tmp_path``."""
    time = SimpleNamespace(now=1e9)
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "CLOCK", costs.Clock(lambda: 0.0, lambda: time.now))
    return time


def kind(length: int = 4, **changes: object) -> Kind:
    target = tiny_target()
    program = Program(target.config, NGram(length=length), widths=(1, 3, 5), policy=Adaptive())
    whole = Kind(program, Params(target.params), batch=3, capacity=64, cache="float32", most=4, reach=40)
    return dataclasses.replace(whole, **changes)


def fresh(of: Kind) -> DecodeState:
    return empty_state(of.program, of.params, tiny_target(), (GREEDY,) * 3, prompts(), (9,) * 3)


def test_the_best_of_several_counts_and_scatter_is_told() -> None:
    asked: list[int] = []
    times = iter([9.0, *[1.0, 1.1, 3.0], *[2.0, 2.0, 2.0]])

    def once(index: int) -> float:
        asked.append(index)
        return next(times)

    seconds, spread = costs.measure(once, 2)
    assert seconds == (1.0, 2.0)
    assert spread == pytest.approx(1.1)
    assert asked == [0, 0, 0, 0, 1, 1, 1], "the first call compiles and is not counted"


def test_a_noisy_measurement_goes_on_until_two_agree_or_patience_ends() -> None:
    times = iter([9.0, *[1.0, 2.0, 3.0, 1.05], *[8.0, 4.0, 2.0, 16.0, 32.0, 64.0, 128.0]])
    seconds, spread = costs.measure(lambda index: next(times), 2)
    assert seconds == (1.0, 2.0)
    assert spread == 2.0
    assert next(times, None) is None


def test_a_wider_round_never_costs_less() -> None:
    table = {0: 2.0, 1: 1.0, 2: 3.0, 3: 2.5}
    assert costs.measure(lambda index: table[index], 4)[0] == (2.0, 2.0, 3.0, 3.0)
    asked = set()

    def once(index: int) -> float:
        asked.add(index)
        return table[index]

    assert costs.measure(once, 4, rests=False)[0] == (1.0, 1.0, 3.0, 3.0)
    assert asked == {1, 2, 3}, "a program that always drafts has no round without a draft"


def test_a_table_is_measured_once_kept_and_listed(
    now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda once, count, rests: (SECONDS[:count], 1.0))
    this = kind()
    first = costs.table(this, lambda: fresh(this))
    assert first.seconds == SECONDS
    assert (first.menu, first.spread, first.taken) == ((1, 3, 5), 1.0, now.now)

    def never() -> DecodeState:
        raise AssertionError("measured again")

    assert costs.table(this, never) == first
    (row,) = costs.stored()
    assert row["here"]
    assert (row["age"], row["again"]) == (0.0, False)
    assert (row["draft"], row["nodes"], row["batch"], row["capacity"]) == ("NGram", 5, 3, 64)
    assert (row["model"], row["dtype"], row["cache"]) == ("llama", "float32", "float32")
    assert row["parameters"] == sum(x.size for x in jax.tree.leaves(this.params.target))
    monkeypatch.setenv("EAGLEJAX_NATIVE_LEVEL", "portable")
    assert not costs.stored()[0]["here"], "other kernels are another machine"


def test_whatever_the_seconds_depend_on_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    this = kind()
    half = Params(jax.tree.map(lambda x: x.astype(jnp.bfloat16), this.params.target))
    others = [
        kind(length=3),
        kind(params=half),
        kind(batch=2),
        kind(capacity=128),
        kind(cache="int8"),
        kind(most=16),
        kind(inputs=jnp.zeros((3, 8), jnp.int32)),
        kind(program=dataclasses.replace(this.program, widths=(1, 5))),
    ]
    names = [k.name for k in (this, *others)]
    monkeypatch.setenv("EAGLEJAX_NO_NATIVE", "1")
    assert len({*names, kind().name}) == len(names) + 1
    monkeypatch.delenv("EAGLEJAX_NO_NATIVE")
    assert kind(reach=41).name == this.name


def table(file: Path, **changes: object) -> Costs:
    return dataclasses.replace(Costs(MENU, SECONDS, 1.05, 1e9, file), **changes)


def test_what_is_no_table_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "costs" / "a.json"
    assert costs._read(file, MENU) is None
    whole = table(file)
    costs._write(whole, {})
    assert costs._read(file, MENU) == whole
    assert costs._read(file, (1, 4)) is None
    row = json.loads(file.read_text())
    wrong = [
        {"seconds": [1, 2, 3, "x"]},
        {"seconds": [1, 2, 3]},
        {"seconds": [1, 2, 3, 0]},
        {"seconds": 3},
        {"spread": 0.5},
        {"spread": "much"},
        {"taken": None},
        {"widths": [1, 4, 9]},
    ]
    for text in ("", "{}", "[]", *(json.dumps({**row, **change}) for change in wrong)):
        file.write_text(text)
        assert costs._read(file, MENU) is None, text
        assert costs.stored() == [] or "widths" in text


def test_old_and_noisy_tables_are_taken_again(tmp_path: Path) -> None:
    good, noisy = table(tmp_path / "a"), table(tmp_path / "a", spread=1.3)
    for seconds, want in ((0.0, False), (29 * DAY, False), (31 * DAY, True), (-1.0, True)):
        assert good.outlived(1e9 + seconds) == want, seconds
    assert not noisy.outlived(1e9 + 60), "it would be as noisy"
    assert noisy.outlived(1e9 + 3600)


def test_a_run_that_contradicts_its_table_forgets_it(now: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "costs" / "a.json"
    this = table(file)
    costs._write(this, {})
    now.now += 3600
    assert not this.forget_if_stale(40, 6.0, 7.0)
    assert not this.forget_if_stale(10, 1.5, 70.0), "too few rounds to tell"
    assert file.exists()
    now.now = 1e9 + 60
    assert not this.forget_if_stale(40, 6.0, 13.0), "just taken: the machine is busy"
    now.now += 3600
    assert this.forget_if_stale(40, 6.0, 13.0)
    assert not file.exists()
    costs._write(this, {})
    assert this.forget_if_stale(40, 6.0, 2.9)
    assert not file.exists()


def test_costs_by_width() -> None:
    this = table(Path("a"))
    assert [this.of(1, rested=True), this.of(1, rested=False), this.of(8, rested=False)] == [0.1, 0.11, 0.3]


def test_an_accelerator_goes_by_its_roofline_until_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    this = kind()
    chip = chips.Chip("toy", "gpu", (), memory=1, bandwidth=1e6, bf16=1e9, int8=None)
    monkeypatch.setattr(costs, "_chip", lambda: chip)
    first = costs.table(this, lambda: fresh(this))
    assert not first.measured
    assert costs.stored() == []
    weights = sum(x.nbytes for x in jax.tree.leaves(this.params.target))
    cache = sum(x.nbytes for x in jax.tree.leaves(fresh(this).cache.layers))
    # Bound by memory at every width, and look-up drafts cost nothing.
    assert first.seconds == pytest.approx(((weights + cache) / 1e6,) * 4)
    slow = dataclasses.replace(chip, bf16=1e3)
    widest = 2 * sum(x.size for x in jax.tree.leaves(this.params.target)) * 5 * 3 / 1e3
    assert costs.roofline(this, slow, jax.eval_shape(lambda: fresh(this)))[-1] == pytest.approx(widest)
    monkeypatch.setattr(costs, "measure", lambda once, count, rests: ((1.0,) * count, 1.0))
    assert costs.take(this, lambda: fresh(this)).measured
    assert costs.table(this, lambda: fresh(this)).seconds == (1.0,) * 4


def test_the_roofline_counts_what_drafting_reads() -> None:
    case, target = CASES["draft_model"], tiny_target()
    chip = chips.Chip("toy", "gpu", (), memory=1, bandwidth=1e6, bf16=1e12, int8=None)

    def seconds(proposer: object, params: object) -> tuple[float, ...]:
        program = Program(target.config, proposer, widths=(1, 3))  # type: ignore[arg-type]
        this = Kind(program, Params(target.params, params), 3, 64, "float32", 4, 40)
        return costs.roofline(this, chip, jax.eval_shape(lambda: fresh(this)))

    plain = seconds(Autoregressive(), None)[0]
    drafted = seconds(case.proposer, target.params)
    assert drafted[0] == pytest.approx(plain)
    assert drafted[1] == pytest.approx((1 + case.proposer.length) * plain, rel=1e-3)
