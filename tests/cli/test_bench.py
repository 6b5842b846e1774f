"""``eaglejax bench`` and ``demo`` on a tiny model: what is printed and what is compared."""

import dataclasses
import json

import pytest
from tiny_model import PRINTABLE, write_model

import eaglejax as ej
from eaglejax.cli import demo
from eaglejax.devices import machine
from eaglejax.measure import near_ties, timing

STATS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "per_position_acceptance_rate",
    "tokens_per_second",
    "target_forwards",
    "widths",
    "rests",
    "predicted_speedup",
    "ttft_ms",
    "tpot_ms",
    "speedup_vs_best_ar",
    "identical_to_ar",
}


@pytest.fixture
def bench(run, model, rows_file):
    def call(*argv, rows=({"id": 1, "prompt": "abcabc"},), dtype=("--dtype", "float32"), tokens=8):
        path = rows_file(*rows)
        options = ["--target", model, "--prompts", path, "--max-new-tokens", tokens, *dtype]
        status, out, _ = run("bench", *options, "--json", *argv)
        (line,) = out.splitlines()
        return json.loads(line), status

    return call


def test_the_object_of_a_session(bench):
    rows = [
        {"id": "a", "turns": [PRINTABLE, "x"]},
        {"id": "b", "prompt": PRINTABLE, "guess": "aab"},
        "{broken",
    ]
    argv = ["--methods", "ngram,prediction", "--prediction-field", "guess"]
    report, status = bench(*argv, rows=rows, tokens=4)
    assert status == 1
    assert [e["id"] for e in report["errors"]] == [3]
    assert list(report["methods"]) == ["ar", "ngram", "prediction"]
    assert report["best_ar"] == "ar"
    assert report["machine"]["dtype"] == "float32"
    assert report["machine"]["versions"]["jax"]
    for name, method in report["methods"].items():
        assert set(method) >= STATS
        assert (method["answers"], method["num_tokens"]) == (3, 12)
        assert method["identical_to_ar"] is True
        assert (method["flips"], method["compared"], method["differing"]) == (0, 3, 0)
        ratio = method["tokens_per_second"] / report["methods"]["ar"]["tokens_per_second"]
        assert method["speedup_vs_best_ar"] == pytest.approx(ratio)
        # Sums over prompts: the first token of each answer comes from the prompt's forward.
        assert method["mean_acceptance_length"] == pytest.approx(9 / method["target_forwards"])
        assert (method["num_draft_tokens"] > 0) == (name != "ar")
    assert bench(*argv, "--limit", 2, rows=rows, tokens=4)[1] == 0


def test_plain_float32_stands_beside_the_default_dtype(bench):
    report, status = bench("--methods", "ar", dtype=())
    assert status == 0
    assert report["machine"]["dtype"] == "bfloat16"
    assert list(report["methods"]) == ["ar", "ar_float32"]
    best = report["best_ar"]
    assert report["methods"][best]["speedup_vs_best_ar"] == 1.0
    assert all(m["speedup_vs_best_ar"] <= 1.0 for m in report["methods"].values())
    assert report["methods"]["ar_float32"]["identical_to_ar"] is None
    assert report["methods"]["ar"]["tie_tolerance"] == near_ties.TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("memory", "turns"), [(1 << 40, "bfbf"), (1, "bbff")])
def test_plain_decoding_in_both_dtypes_takes_turns_where_memory_allows(bench, monkeypatch, memory, turns):
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory)
    timed, seen = timing.timed, []

    def spy(target, *args, **options):
        seen.append(target.dtype.name[0])
        return timed(target, *args, **options)

    monkeypatch.setattr(timing, "timed", spy)
    rows = [{"id": 1, "prompt": "abcabc"}, {"id": 2, "prompt": "cba"}]
    report, status = bench("--methods", "ar", dtype=(), rows=rows, tokens=3)
    assert (status, "".join(seen)) == (0, turns)
    assert [m["answers"] for m in report["methods"].values()] == [2, 2]


def test_chat_draft_and_length_reach_the_runs(bench, tmp_path):
    draft = write_model(tmp_path / "draft", seed=1, layers=1)
    # One token below the context, so that the template's own tokens do not fit any more.
    longest = {"id": "long", "prompt": "x" * 511}
    assert bench("--methods", "ar", rows=[longest])[1] == 0
    chat, status = bench("--methods", "ar", "--chat", rows=[longest])
    assert status == 1
    assert "513 tokens" in chat["errors"][0]["error"]
    assert bench(tokens=5)[0]["methods"]["ar"]["num_tokens"] == 5
    drafted, status = bench("--methods", "draft_model", "--draft", draft)
    assert status == 0
    assert drafted["methods"]["draft_model"]["num_draft_tokens"] > 0


def test_another_text_fails_the_bench(bench, monkeypatch):
    decode = timing.decode

    def tampered(target, prompt, on_text=None, **options):
        result = decode(target, prompt, on_text, **options)
        if options.get("proposer") is not None and not isinstance(options["proposer"], ej.Autoregressive):
            result.token_ids[3] = (result.token_ids[3] + 1) % 256
        return result

    monkeypatch.setattr(timing, "decode", tampered)
    report, status = bench()
    assert status == 1
    assert report["methods"]["ar"]["identical_to_ar"] is True
    wrong = report["methods"]["ngram"]
    assert wrong["identical_to_ar"] is False
    assert wrong["differing"] == 1
    assert wrong["flips"] >= 1
    assert wrong["largest_flip_gap"] > wrong["tie_tolerance"]


def test_a_timed_run_holds_no_compilation(model):
    target = ej.load_target(model, dtype="float32")
    runs = []

    def view():
        runs.append("")
        return lambda text: runs.append(runs.pop() + text)

    result = timing.timed(target, (1, 2, 3), view, max_new_tokens=30, rounds_a_chunk=4)
    assert runs[-1] == result.text
    before = timing.compilations()
    timing.decode(target, (4, 5, 6), max_new_tokens=30, rounds_a_chunk=4)
    assert timing.compilations() == before
    timing.decode(target, (4, 5, 6), max_new_tokens=30, rounds_a_chunk=5)
    assert timing.compilations() > before


def test_a_table_for_people(run, model, rows_file):
    path = rows_file({"prompt": "ab"})
    options = ["--prompts", path, "--max-new-tokens", 6, "--dtype", "float32"]
    status, out, err = run("bench", "--target", model, *options)
    assert (status, out) == (0, "")
    for word in ("ngram", "tau", "vs fastest AR", "same text as AR", "yes"):
        assert word in err


def test_the_demo_shows_and_counts_the_same_texts(run, model, drafts, monkeypatch):
    monkeypatch.setattr(demo, "TARGET", model)
    assert demo.DRAFTS["eagle3"].model == "demo"
    ours = dataclasses.replace(demo.DRAFTS["eagle3"], model=drafts["eagle3"])
    monkeypatch.setitem(demo.DRAFTS, "eagle3", ours)
    short = demo.scenes(quick=True)
    assert len(short) == 2
    assert len(demo.scenes(quick=False)) > 2
    tiny = [
        demo.Scene(s.title, s.method, s.row.__class__(s.row.id, prompt="abc", predictions=("abcabc",)), 6)
        for s in short
    ]
    monkeypatch.setattr(demo, "scenes", lambda quick: tiny if quick else tiny[:1])
    monkeypatch.setattr(demo, "fastest_form", lambda: ("bfloat16", None, "a product took less"))

    status, out, _ = run("demo", "--quick", "--json")
    report = json.loads(out)
    assert status == 0
    assert report["identical"] is True
    assert [s["id"] for s in report["scenes"]] == ["write", "edit"]
    for scene, method in zip(report["scenes"], ("eagle3", "prediction"), strict=True):
        assert list(scene["methods"]) == ["ar", method, "ar_float32"]
        assert all(set(m) >= STATS for m in scene["methods"].values())
        plain, drafted, _ = scene["results"]
        assert (plain["method"], drafted["method"]) == ("ar", method)
        assert plain["token_ids"] == drafted["token_ids"]

    monkeypatch.setattr(demo, "fastest_form", lambda: ("float32", None, "it was measured"))
    status, out, err = run("demo")
    assert status == 0
    assert "in float32: it was measured" in err
    assert "ar_float32" not in err
    assert out.count(plain["text"]) == 2
    assert "--- eagle3 ---" in out
    assert "--- prediction ---" not in out
    assert "same text as AR" in err
