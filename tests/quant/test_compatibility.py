"""Methods, weight schemes and cache formats together: a cell each time, every pair with the slow tests."""

from __future__ import annotations

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
