import ast
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import device_bench, device_check


def report_of(capfd, *arguments):
    status = device_check.main(["--dry-run", *arguments])
    out, err = capfd.readouterr()
    return status, json.loads(out), [json.loads(line) for line in err.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_dry_run_checks_and_times_every_part(capfd):
    status, report, progress = report_of(capfd)
    assert status == 0
    assert list(report["parts"]) == list(device_check.PARTS)
    results = [result for part in report["parts"].values() for result in part.values()]
    assert len(progress) == len(results)
    for part, cases in report["parts"].items():
        for result in cases.values():
            assert result["passed"] if part.startswith("numerics") else result["us"] > 0, (part, result)
    assert len(report["parts"]["time of the model"]) == 4


def test_no_case_begins_after_the_seconds(capfd):
    status, report, progress = report_of(capfd, "--seconds", "-1")
    assert status == 0
    assert not progress
    assert all("skipped" in result for part in report["parts"].values() for result in part.values())


def test_what_fails_or_is_wrong_is_reported_and_the_rest_still_runs(capfd, monkeypatch):
    def cases(bench):
        yield "broken", lambda: 1 / 0
        yield "wrong", lambda: device_bench.compare(jnp.full(3, jnp.nan), jnp.zeros(3), 1.0)
        yield "fine", lambda: device_bench.compare(jnp.ones(3), jnp.ones(3), 0.0)

    monkeypatch.setattr(device_check, "PARTS", {"part": cases})
    status, report, _ = report_of(capfd)
    assert status == 1
    results = report["parts"]["part"]
    assert results["broken"]["failed"].startswith("ZeroDivisionError")
    assert results["wrong"] | {"seconds": 0} == {
        "error": "nan",
        "tolerance": 1.0,
        "passed": False,
        "seconds": 0,
    }
    assert results["fine"]["passed"]


def test_without_an_accelerator_it_is_a_dry_run_or_refused(capfd):
    with pytest.raises(SystemExit):
        device_check.main([])
    assert "there is --dry-run for it" in capfd.readouterr().err


def test_the_tree_it_times_is_closed_under_ancestors():
    seen = device_bench.binary_tree(7)
    np.testing.assert_array_equal(np.flatnonzero(seen[6]), [0, 2, 6])
    assert (seen.sum(1) == [1, 2, 2, 3, 3, 3, 3]).all()


def test_it_needs_nothing_beyond_the_packages_and_jax():
    names = set()
    for module in (device_check, device_bench):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    ours = {name for name in names if name.startswith("experiments")}
    assert ours == {"experiments.device_bench"}
    roots = {name.split(".")[0] for name in names - ours} - set(sys.stdlib_module_names)
    assert roots == {"eaglejax", "kernels_pallas", "jax", "numpy"}
