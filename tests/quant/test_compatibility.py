"""Methods on weight schemes with cache formats: a few cells each time, all of them with the slow tests."""

from __future__ import annotations

import compatibility as table
import pytest

QUICK = (
    ("ngram", "w8a8", "int8"),
    ("prediction", "w4a16", "turbo4"),
    ("eagle3", "w8a8-static", "int8-static"),
)


@pytest.mark.parametrize("cell", QUICK, ids="-".join)
def test_a_few_cells(cell: tuple[str, str, str]) -> None:
    assert table.same(*cell)


@pytest.mark.slow
def test_every_cell_and_write_the_page() -> None:
    cells = {
        (method, scheme, cache): table.same(method, scheme, cache)
        for scheme in table.SCHEME_AXIS
        for cache in table.CACHE_AXIS
        for method in table.METHOD_AXIS
    }
    table.PAGE.write_text(table.page(cells), encoding="utf-8")
    assert all(cells.values()), [cell for cell, same in cells.items() if not same]
