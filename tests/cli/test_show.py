"""What is shown is what there is: names with brackets, equal names, characters that no terminal can hold."""

import io
import json
import sys

import pytest

from eaglejax import json_text
from eaglejax.checkpoint.files import progress
from eaglejax.cli import show

STATS = {
    "tokens_per_second": 1.0,
    "mean_acceptance_length": 2.0,
    "per_position_acceptance_rate": [0.5],
    "num_tokens": 3,
    "ttft_ms": 4.0,
    "tpot_ms": 5.0,
}


def test_widths_are_shown_where_they_were_chosen(capfd):
    chosen = STATS | {"widths": {"1": 7, "4": 3, "16": 0}, "rests": 5, "predicted_speedup": 1.26}
    fixed = STATS | {"widths": {"8": 4}, "rests": 0, "predicted_speedup": None}
    rows = [("a", chosen), ("b", fixed), ("c", STATS)]
    show.print_widths(rows)
    assert capfd.readouterr().err == "rounds of a: no draft 5, width 1 2, width 4 3\n"
    show.stderr().print(show.stats_table("t", rows))
    err = capfd.readouterr().err
    assert "predicted" in err
    assert "1.26x" in err
    show.stderr().print(show.stats_table("t", rows[1:]))
    assert "predicted" not in capfd.readouterr().err


def test_names_are_no_markup_and_equal_names_are_rows_of_their_own(capfd):
    names = ["a[/b]", "[v2]model", "[red]", ":smile:", "same", "same", "back\\"]
    show.stderr().print(show.stats_table("[x] of a[/b]", [(name, STATS) for name in names]))
    show.stderr().print("[dim]x[/]")
    with show.status("loading a[/b]"), show.progress("a[/b]", 1) as advance, progress("[/b]", 1) as more:
        advance()
        more()
    err = capfd.readouterr().err
    for name in names[:5]:
        assert name in err
    assert err.count("same") == 2
    assert "[x] of a[/b]" in err
    assert "[dim]x[/]" in err
    assert "loading a[/b]" in err


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_no_text_is_lost_on_any_terminal(monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    value = {"id": "\ud800", "text": "caf\u00e9 \u6f22 \U0001f642"}
    show.print_json(value)
    show.print_json({"text": "caf\u00e9"})
    show.write_text("caf\u00e9 \ud800")
    first, second, text = raw.getvalue().decode(encoding).split("\n")
    assert json.loads(first) == value
    assert json.loads(second) == {"text": "caf\u00e9"}
    assert text == ("caf\\xe9 \\ud800" if encoding == "ascii" else "caf\u00e9 \\ud800")


def test_notes_on_a_draft_are_said_once(capfd, monkeypatch, tmp_path):
    for name, notes, said in (
        ("a[/b]", ["one", "two \ud800"], 2),
        ("b", ["one", "two \ud800"], 0),
        ("b", ["one", "three"], 1),
    ):
        show.print_notes_once(name, tmp_path, notes)
        assert capfd.readouterr().err.count("said once; `eaglejax inspect") == said
    show.print_notes_once("elsewhere", tmp_path / "other", ["one"])
    assert capfd.readouterr().err.startswith("elsewhere: one (said once")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(show, "cache_dir", lambda: tmp_path / "file")
    for _ in range(2):
        show.print_notes_once("b", tmp_path, ["one"])
        assert capfd.readouterr().err.startswith("b: one")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_written_whatever_a_name_holds(encoding):
    value = {"caf\u00e9": ["\udcff", "\u6f22"]}
    text = json_text.dump(value, encoding=encoding)
    assert json.loads(text.encode(encoding)) == value
    assert ("\u6f22" in json_text.dump(["\u6f22"], encoding=encoding)) == (encoding == "utf-8")


def test_rows_with_equal_ids_are_all_answered(run, model, rows_file):
    path = rows_file({"id": "a[/b]", "prompt": "ab"}, {"id": "a[/b]", "prompt": "cd"}, {"prompt": "\ud800"})
    arguments = ["--target", model, "--dtype", "float32", "--max-new-tokens", 2, "--prompts", path]
    status, out, err = run("generate", *arguments)
    assert status == 1
    assert out.count("[a[/b]]\n") == 2
    assert err.count("a[/b]") == 2
    assert "half of a surrogate pair" in err
