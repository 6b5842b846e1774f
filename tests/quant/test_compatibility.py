"""Methods, weight schemes and cache formats together: a cell each time, every pair with the slow tests."""

from __future__ import annotations

import re

import compatibility as table
import jax
import pytest


def test_one_cell() -> None:
    assert table.same("eagle3", "w8a8-static", "int8-static")


@pytest.mark.slow
def test_every_pair_and_write_the_page() -> None:
    cells = {}
    for n, cell in enumerate(table.cells()):
        cells[cell] = table.same(*cell)
        if n % 16 == 15:
            jax.clear_caches()  # hundreds of programs would exhaust the process's memory mappings
    table.PAGE.write_text(table.page(cells), encoding="utf-8")
    assert all(cells.values()), [cell for cell, same in cells.items() if not same]


def test_the_page_has_every_method_scheme_and_format() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## .*\n\n\| \w+ \| (.*) \|\n.*\n((?:\|.*\n)*)", text, re.MULTILINE)
    axes = [
        (table.SCHEME_AXIS, table.METHOD_AXIS),
        (table.CACHE_AXIS, table.METHOD_AXIS),
        (table.CACHE_AXIS, table.SCHEME_AXIS),
    ]
    assert len(sections) == len(axes)
    for (columns, body), (rows, names) in zip(sections, axes, strict=True):
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines()]
        assert tuple(columns.split(" | ")) == names
        assert tuple(row[0] for row in cells) == rows
        assert {mark for row in cells for mark in row[1:]} == {"="}
