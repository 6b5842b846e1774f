"""The join of parameter tables, name tables and files, on a table small enough to see through."""

from __future__ import annotations

import numpy as np
import pytest

from eaglejax.checkpoint import tables
from eaglejax.checkpoint.tables import MINUS_ONE, TRANSPOSE, Layout, Rule, materialize, plan
from eaglejax.errors import CheckpointError
from eaglejax.pytree import ArrayInfo, leaf_paths

TABLE = {
    "layers": [{"w": ArrayInfo((3, 2), np.float32, (None, None)), "n": ArrayInfo((2,), np.float32, (None,))}]
    * 2,
    "experts": ArrayInfo((4, 3, 2), np.float32, (None, None, None)),
}
RULES = [
    Rule("layers.{l}.w", "b{l}.w", TRANSPOSE),
    Rule("layers.{l}.n", "b{l}.n", MINUS_ONE),
    Rule("experts", "x.{e}", TRANSPOSE),
    Rule("experts", "x", TRANSPOSE),
]


class Store(dict):
    """Arrays by name, remembering how many rows were asked for at once."""

    most = 0

    def names(self):
        return self.keys()

    def shape(self, name):
        return self[name].shape

    def rows(self, name, start, stop):
        self.most = max(self.most, stop - start)
        return self[name].reshape(-1, self[name].shape[-1])[start:stop]


@pytest.fixture
def store():
    rng = np.random.default_rng(0)
    shapes = {"b0.w": (2, 3), "b1.w": (2, 3), "b0.n": (2,), "b1.n": (2,), "x": (4, 2, 3)}
    return Store({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()})


def build(store, rules=RULES, **options):
    return {a.leaf: materialize(a, store) for a in plan(TABLE, rules, store, where="file", **options)}


def test_layouts(store):
    made = build(store)
    np.testing.assert_array_equal(made["layers.1.w"], store["b1.w"].T)
    np.testing.assert_array_equal(made["layers.0.n"], store["b0.n"] - 1)
    np.testing.assert_array_equal(made["experts"], store["x"].swapaxes(1, 2))
    assert all(array.ctypes.data % tables.ALIGNMENT == 0 for array in made.values())


def test_one_tensor_an_expert(store):
    stack = store.pop("x")
    store |= {f"x.{e}": matrix for e, matrix in enumerate(stack)}
    np.testing.assert_array_equal(build(store)["experts"], stack.swapaxes(1, 2))


def test_rows_are_moved_before_they_are_transposed(store):
    rules = [
        Rule("layers.{l}.w", "b{l}.w", Layout(transposed=True, rows=lambda rows: rows[::-1])),
        *RULES[1:],
    ]
    np.testing.assert_array_equal(build(store, rules)["layers.0.w"], store["b0.w"][::-1].T)


def test_large_tensors_are_read_in_pieces(store, monkeypatch):
    whole = build(store)
    monkeypatch.setattr(tables, "_CHUNK_ELEMENTS", 3)
    store.most = 0
    pieces = build(store)
    assert store.most == 1
    for leaf, array in whole.items():
        np.testing.assert_array_equal(pieces[leaf], array)


def test_a_name_no_rule_knows(store):
    with pytest.raises(CheckpointError, match=r"file lacks 1 tensors .*no name is known for experts"):
        build(store, RULES[:2])


def test_missing_tensors_are_counted_and_named(store):
    del store["b1.w"], store["b0.n"]
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .*: b0\.n, b1\.w"):
        build(store)


def test_unused_tensors_unless_listed(store):
    store["extra.5"] = np.zeros(1)
    with pytest.raises(CheckpointError, match=r"1 tensors that .* no use for: extra\.5"):
        build(store)
    assert set(build(store, ignorable=[r"extra\.\d+"])) == set(leaf_paths(TABLE))
    with pytest.raises(CheckpointError, match="no use for"):
        build(store, ignorable=["extra"])


def test_two_ways_to_one_leaf(store):
    store |= {f"x.{e}": matrix for e, matrix in enumerate(store["x"])}
    with pytest.raises(CheckpointError, match=r"holds experts twice"):
        build(store)


def test_two_leaves_of_one_tensor(store):
    rules = [Rule("layers.{l}.w", "b0.w", TRANSPOSE), *RULES[1:]]
    del store["b1.w"]
    with pytest.raises(CheckpointError, match=r"'b0\.w' would fill both layers\.0\.w and layers\.1\.w"):
        build(store, rules)


def test_shapes(store):
    store["x"] = store["x"][:3]
    with pytest.raises(
        CheckpointError, match=r"'x' has shape \(3, 2, 3\), the configuration asks for \(4, 2, 3\)"
    ):
        build(store)
