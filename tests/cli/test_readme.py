"""What the README shows runs as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
import tyro

from eaglejax.checkpoint.demo import DEMOS
from eaglejax.checkpoint.files import cache_dir
from eaglejax.cli.main import Command

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.S | re.M)
    return [text for name, text in fenced if name == language]


def test_every_command_line_is_one():
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("eaglejax ")]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line.split(" > ")[0])[1:]
        command = tyro.cli(Command, args=words, config=(tyro.conf.FlagCreatePairsOff,))
        assert callable(command.run)


@pytest.mark.slow
def test_the_notebook_runs_on_the_demo_model(capsys):
    if not (cache_dir() / "demo" / DEMOS["demo"].filename).is_file():
        pytest.skip("the demo model has not been downloaded; `make demo` fetches it")
    first = blocks("python")[0]
    assert 'load_target("demo")' in first
    exec(compile(first, "README.md", "exec"), {})
    text = capsys.readouterr().out
    assert "return" in text
    assert re.search(r"^[1-9]\.\d+ \[0\.", text, flags=re.M), "an acceptance length and its rates"
    assert len(re.findall(r"^(stop|length) ", text, flags=re.M)) == 2
