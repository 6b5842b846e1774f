"""The demo model with a trained draft: JAX against torch on the host."""

import json
import os

import pytest

from eaglejax.checkpoint.demo import DEMO_DRAFTS
from eaglejax.cli.main import main

DRAFT = os.environ.get("EAGLEJAX_TEST_DRAFT") or ("demo" if DEMO_DRAFTS["demo"].is_dir() else None)


@pytest.mark.slow
@pytest.mark.skipif(DRAFT is None, reason="no draft ships yet; name one for demo in EAGLEJAX_TEST_DRAFT")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model(tmp_path, capfd, dtype):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "fib", "prompt": "def fib(n):\n"}) + "\n")
    argv = ["parity", "--target", "demo", "--draft", DRAFT, "--prompts", str(prompts), "--dtype", dtype]
    status = main([*argv, "--backend", "torch-cpu", "--max-new-tokens", "12", "--json"])
    report = json.loads(capfd.readouterr()[0])
    assert status == 0, report["first_divergence"]
    (prompt,) = report["prompts"]
    assert prompt["complete"]
    assert len(prompt["tokens"]) == 12
    # Every operation of all 24 layers, in the prompt's chunk and in two rounds.
    checked = {(x["part"], x["operation"]): x["checked"] for x in report["operations"]}
    assert checked["target", "attention"] >= 3 * 24
    if dtype == "float32":
        assert prompt["identical"]
