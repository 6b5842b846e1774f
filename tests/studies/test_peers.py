"""The comparison with other engines: its file is whole, its workers are asked in turns, and its ratios are
what they should be of known times."""

import json

import pytest

from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.train.settings import parse, read_toml
from experiments import record
from experiments.peers import compare

STUB = """
import json, sys
print(json.dumps({"version": sys.argv[1] + " 1.0", "options": json.loads(sys.argv[3])}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["prompt"] == [13]:
        sys.exit(3)
    short = asked["prompt"] == [7]
    tokens = list(range(asked["tokens"] - short))
    print(json.dumps({"tokens": tokens, "first": 0.5, "seconds": 2.0}), flush=True)
"""


def settings(**changes):
    whole = read_toml(record.ROOT / "peers" / "demo.toml")
    return parse(compare.Settings, whole | changes)


def test_the_file_is_whole():
    found = settings()
    found.check()
    assert {mode.engine for mode in found.modes} == set(compare.ENGINES)
    assert found.modes[1].options(2) == {"dtype": "bfloat16", "draft": "demo", "threads": 2}
    two = read_toml(record.ROOT / "peers" / "demo.toml")["modes"][:1] * 2
    for changes, match in (
        ({"modes": two}, "its own name"),
        ({"turns": 0}, "turns"),
        ({"modes": two[:1]}, "two"),
    ):
        with pytest.raises(ConfigError, match=match):
            settings(**changes).check()


def test_workers_answer_in_turns_and_their_failures_are_named(tmp_path, monkeypatch):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(compare, "WORKER", stub)
    found = settings()
    with compare.worker(found.modes[3], "a.gguf", found, compare.interpreters(())) as made:
        assert made.version == "llama 1.0"
        assert made.ask([1, 2], 3) == {"tokens": [0, 1, 2], "first": 0.5, "seconds": 2.0}
        with pytest.raises(EaglejaxError, match=r"llama\.cpp gave 2 of 3 tokens"):
            made.ask([7], 3)
        with pytest.raises(EaglejaxError, match=r"llama\.cpp ended before it answered"):
            made.ask([13], 3)


class Fake:
    """Answers in so many seconds a token, the first run of each prompt in ten times as many."""

    def __init__(self, log, name, seconds, text):
        self.log, self.name, self.seconds, self.text = log, name, list(seconds), text
        self.asked = set()

    def ask(self, prompt, tokens):
        self.log.append(self.name)
        warm = tuple(prompt) in self.asked
        self.asked.add(tuple(prompt))
        each = self.seconds.pop(0) if warm else 100.0
        return {"tokens": self.text[:tokens], "first": 1.0, "seconds": 1.0 + each * (tokens - 1)}


def test_ratios_are_taken_within_a_turn():
    log = []
    workers = {
        "a": Fake(log, "a", [0.1, 0.2, 0.4], [1, 2, 3, 4, 5]),
        "b": Fake(log, "b", [0.2, 0.2, 0.2], [1, 2, 9, 4, 5]),
    }
    found = settings(max_new_tokens=5, turns=3)
    figures = compare.measured(workers, {"suite": [[1, 2]]}, found)["suite"]
    assert log == ["a", "b"] * 4
    assert figures["a"]["ratio"] == {"median": 1.0, "least": 1.0, "greatest": 1.0}
    assert figures["b"]["ratio"] == pytest.approx({"median": 1.0, "least": 0.5, "greatest": 2.0})
    assert figures["b"]["tokens_per_second"]["median"] == pytest.approx(5.0)
    assert (figures["a"]["same"], figures["b"]["same"]) == (1.0, 0.4)
    text = compare.table({"suite": figures})
    assert "| suite | b | 1.00 (0.50 to 2.00) | 5.0 | 40% |" in text
    json.dumps(figures)


@pytest.mark.parametrize("text", ["llama", "vllm=/bin/python", "llama="])
def test_interpreters_are_named_by_engine(text):
    assert compare.interpreters(["llama=/x/python"])["llama"] == "/x/python"
    with pytest.raises(ConfigError, match="ENGINE=PATH"):
        compare.interpreters([text])
