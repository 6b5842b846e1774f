"""``eaglejax generate`` on a tiny model: what is printed, and that every option does something."""

import io
import json

import pytest
from tiny_model import PRINTABLE, write_model

import eaglejax as ej
from eaglejax.cli.doctor import tiny_config
from eaglejax.cli.methods import proposer_from
from eaglejax.config import SpeculativeConfig

STATS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "per_position_acceptance_rate",
    "tokens_per_second",
    "target_forwards",
    "ttft_ms",
    "tpot_ms",
}
TALK = [{"role": "system", "content": "own"}, {"role": "user", "content": "hello"}]
F32 = ["--dtype", "float32"]


@pytest.fixture
def answers(run, model):
    """Objects that ``generate --json`` prints, and the exit status."""

    def call(*argv, target=model, dtype=F32, tokens=8):
        status, out, _ = run(
            "generate", "--target", target, *dtype, "--max-new-tokens", tokens, "--json", *argv
        )
        return [json.loads(line) for line in out.splitlines()], status

    return call


def one(result):
    (value,), status = result
    assert status == 0
    return value


def test_the_object_of_a_prompt(answers, model):
    value = one(answers("--prompt", "abcabcabc", "--method", "ngram", tokens=12))
    assert set(value) == {"id", "text", "token_ids", "finish_reason", "stats"}
    assert set(value["stats"]) >= STATS
    stats = value["stats"]
    assert len(value["token_ids"]) == 12
    assert value["finish_reason"] == "length"
    assert stats["mean_acceptance_length"] == pytest.approx(11 / stats["target_forwards"])
    assert stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
    assert stats["tokens_per_second"] > 0
    assert stats["ttft_ms"] > 0
    expected = ej.generate(ej.load_target(model, dtype="float32"), "abcabcabc", max_new_tokens=12)
    assert value["token_ids"] == expected.token_ids
    assert value["text"] == expected.text


def test_streamed_text_is_the_same_text(answers, run, model):
    expected = one(answers("--prompt", "stream me"))["text"]
    status, out, err = run(
        "generate", "--target", model, *F32, "--max-new-tokens", 8, "--prompt", "stream me"
    )
    assert (status, out) == (0, expected + "\n")
    assert "tokens/s" in err


def test_text_of_a_file_without_json(run, model, rows_file):
    path = rows_file({"id": "x", "prompt": "ab"}, {"id": "y", "prompt": ""})
    status, out, err = run("generate", "--target", model, *F32, "--max-new-tokens", 4, "--prompts", path)
    assert status == 1
    assert out.startswith("[x]\n")
    assert "[y]" not in out
    assert "prompt y: " in err
    assert "line 2" in err


def test_rows_of_a_file_in_order_whatever_the_batch(answers, rows_file):
    path = rows_file(
        {"id": "p", "prompt": "plain"},
        {"id": "m", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "t", "turns": ["first", "second", "third"]},
        {"prompt": "another, longer than the others are"},
    )
    alone, status = answers("--prompts", path)
    assert status == 0
    together, _ = answers("--prompts", path, "--batch-size", 3)
    assert [v["id"] for v in alone] == ["p", "m", "t", 4]
    for a, b in zip(alone, together, strict=True):
        assert (a["id"], a["text"], a["token_ids"]) == (b["id"], b["text"], b["token_ids"])
    turns = alone[2]["turns"]
    assert len(turns) == 3
    assert alone[2]["token_ids"] == turns[2]["token_ids"]
    assert alone[2]["stats"]["target_forwards"] == sum(t["stats"]["target_forwards"] for t in turns)


def test_turns_see_the_answers_before_them(answers, rows_file):
    turns = one(answers("--prompts", rows_file({"turns": ["first", "second"]})))["turns"]
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": turns[0]["text"]},
        {"role": "user", "content": "second"},
    ]
    value = one(answers("--prompts", rows_file({"messages": talk})))
    assert value["token_ids"] == turns[1]["token_ids"]
    other = [*talk[:1], {"role": "assistant", "content": "something else"}, talk[2]]
    assert one(answers("--prompts", rows_file({"messages": other})))["token_ids"] != value["token_ids"]


def test_a_bad_prompt_costs_the_others_nothing(answers, rows_file):
    good = {"id": "good", "prompt": "ab"}
    values, status = answers(
        "--prompts",
        rows_file(good, "{broken", {"id": "long", "prompt": "x" * 600}, {"id": "last", "prompt": "cd"}),
        "--batch-size",
        2,
    )
    assert status == 1
    assert [v["id"] for v in values] == ["good", 2, "long", "last"]
    assert ["error" in v for v in values] == [False, True, True, False]
    assert "line 2" in values[1]["error"]
    assert "512" in values[2]["error"]
    assert values[0]["token_ids"] == one(answers("--prompts", rows_file(good)))["token_ids"]


def test_a_turn_that_cannot_be_served_keeps_the_turns_before_it(answers, rows_file):
    (value,), status = answers("--prompts", rows_file({"id": "t", "turns": ["ok", "x" * 600, "never"]}))
    assert status == 1
    assert "error" in value
    assert "text" not in value
    assert len(value["turns"]) == 1


CHANGES = {
    "--max-new-tokens": [["--max-new-tokens", 3], []],
    "--temperature": [["--temperature", 1.5, "--seed", 1], []],
    "--seed": [["--temperature", 1.5, "--seed", 1], ["--temperature", 1.5, "--seed", 2]],
    "--top-k": [["--temperature", 9, "--seed", 1, "--top-k", 2], ["--temperature", 9, "--seed", 1]],
    "--top-p": [["--temperature", 9, "--seed", 1, "--top-p", 0.05], ["--temperature", 9, "--seed", 1]],
    "--chat": [["--chat"], []],
    "--prompt": [["--prompt", "another"], []],
}


@pytest.mark.parametrize("option", CHANGES)
def test_the_option_changes_the_text(answers, option):
    with_it, without = (
        one(answers(*(["--prompt", "a prompt"] if option != "--prompt" or not extra else []), *extra))
        for extra in CHANGES[option]
    )
    assert with_it["token_ids"] != without["token_ids"]


def test_the_command_has_what_the_function_has(answers, model, rows_file):
    """Every option of sampling and stopping, a row's own stop token, and the standard input as a file."""
    target = ej.load_target(model, dtype="float32")
    sampling = ej.Sampling(
        temperature=3.0,
        min_p=0.01,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={65: 9.0, 66: float("-inf")},
        seed=3,
    )
    options = ["--temperature", 3, "--min-p", 0.01, "--repetition-penalty", 1.5, "--presence-penalty", 0.5]
    options += ["--frequency-penalty", 0.25, "--logit-bias", '{"65": 9, "66": "-inf"}', "--seed", 3]
    expected = ej.generate(target, "a prompt", sampling=sampling, logprobs=True, max_new_tokens=8)
    value = one(answers("--prompt", "a prompt", *options, "--logprobs"))
    assert value["token_ids"] == expected.token_ids
    assert value["logprobs"] == expected.logprobs
    token = expected.token_ids[3]
    cut = expected.token_ids[: expected.token_ids.index(token) + 1]
    asked = rows_file({"prompt": "a prompt"}, {"prompt": "a prompt", "stop_token_ids": [token]})
    first, second = answers("--prompts", asked, *options, "--logprobs")[0]
    assert (first["token_ids"], first["finish_reason"]) == (expected.token_ids, expected.finish_reason)
    assert (second["token_ids"], second["finish_reason"]) == (cut, "stop")
    text = next(c for c in expected.text if c.isascii() and c.isprintable())
    for stop in (["--stop-token-ids", token], ["--eos", token]):
        value = one(answers("--prompt", "a prompt", *options, "--logprobs", *stop))
        assert (value["token_ids"], value["finish_reason"]) == (cut, "stop")
    value = one(answers("--prompt", "a prompt", *options, "--logprobs", "--stop", "never", text))
    assert value["text"] == expected.text[: expected.text.index(text)]


def test_conversations_from_the_standard_input(answers, run, model, monkeypatch, rows_file):
    rows = rows_file({"id": "t", "turns": ["first", "second"]}, {"id": "m", "messages": TALK})
    values = answers("--prompts", rows, "--system", "S")[0]
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "first"}]
    target = ej.load_target(model, dtype="float32")
    plain = ej.generate(target, asked, max_new_tokens=8)
    assert values[0]["turns"][0]["token_ids"] == plain.token_ids
    assert values[1]["token_ids"] == ej.generate(target, TALK, max_new_tokens=8).token_ids
    with rows.open("rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        arguments = ["--target", model, *F32, "--max-new-tokens", 8, "--prompts", "-", "--system", "S"]
        status, out, _ = run("generate", *arguments)
    assert status == 0
    texts = [turn["text"] for turn in values[0]["turns"]]
    whole = f"[t, turn 1]\n{texts[0]}\n\n[t, turn 2]\n{texts[1]}\n\n[m]\n{values[1]['text']}\n\n"
    assert out == whole


def test_a_seed_repeats_its_text_and_none_does_not(answers):
    hot = ["--prompt", "a prompt", "--temperature", 5]
    first, again = (one(answers(*hot, "--seed", 7))["token_ids"] for _ in range(2))
    assert first == again
    assert one(answers(*hot))["token_ids"] != one(answers(*hot))["token_ids"]


def test_dtype_is_that_of_the_weights(monkeypatch, run, model):
    seen = []
    load = ej.load_target
    monkeypatch.setattr(ej, "load_target", lambda *a, **k: seen.append(load(*a, **k)) or seen[-1])
    for dtype in ([], F32, ["--dtype", "bfloat16"]):
        assert run("generate", "--target", model, "--prompt", "a", "--max-new-tokens", 1, *dtype)[0] == 0
    assert [t.dtype.name for t in seen] == ["bfloat16", "float32", "bfloat16"]
    packed = ["--quant", "w8a8"]
    assert run("generate", "--target", model, "--prompt", "a", "--max-new-tokens", 1, *packed)[0] == 0
    assert [t.quantization for t in seen[-2:]] == [None, "w8a8"]


def drafting(value):
    return {k: value["stats"][k] for k in ("num_drafts", "num_draft_tokens", "target_forwards")}


def test_methods_draft_and_leave_the_text_alone(answers, model, tmp_path, rows_file):
    plain = one(answers("--prompt", "abcabc", tokens=16))
    assert drafting(plain) == {"num_drafts": 0, "num_draft_tokens": 0, "target_forwards": 15}
    other = write_model(tmp_path / "draft", seed=1, layers=1)
    path = rows_file({"prompt": "abcabc", "guess": plain["text"]})
    ways = {
        "self": ["--prompt", "abcabc", "--draft", model],
        "draft_model": ["--prompt", "abcabc", "--method", "draft_model", "--draft", other],
        "ngram": ["--prompt", "abcabc", "--method", "ngram"],
        "prediction": ["--prompts", path, "--method", "prediction", "--prediction-field", "guess"],
    }
    values = {name: one(answers(*way, tokens=16)) for name, way in ways.items()}
    for value in values.values():
        assert value["token_ids"] == plain["token_ids"]
        assert value["stats"]["num_draft_tokens"] > 0
    # A draft that is the target is always right; four drafts and a bonus token a round.
    assert values["self"]["stats"]["target_forwards"] == 3
    assert values["draft_model"]["stats"]["target_forwards"] > 3


def test_settings_of_a_speculative_config_reach_the_proposer(answers):
    target = ej.random_target(tiny_config())
    told = {
        ej.NGram(length=5): {"num_speculative_tokens": 5},
        # One bound alone is both, as in vLLM.
        ej.NGram(max_ngram=4, min_ngram=4): {"prompt_lookup_max": 4},
        ej.NGram(max_ngram=2, min_ngram=2): {"prompt_lookup_min": 2},
        ej.NGram(max_ngram=4, min_ngram=2): {"prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ej.NGram(candidates=3, size=9): {"tree_branching": 3, "tree_nodes": 9},
    }
    for proposer, settings in told.items():
        assert proposer_from(target, SpeculativeConfig("ngram", **settings)) == proposer
    told = {
        ej.Suffix(): {},
        ej.Suffix(length=5, size=6): {"num_speculative_tokens": 5},
        ej.Suffix(length=5, size=9, places=2): {
            **{"num_speculative_tokens": 5, "tree_nodes": 9, "tree_branching": 2}
        },
        ej.Suffix(max_tree_depth=10, max_spec_factor=2.0, min_token_prob=0.2, max_cached_requests=0): {
            "suffix_decoding_max_tree_depth": 10,
            "suffix_decoding_max_spec_factor": 2.0,
            "suffix_decoding_min_token_prob": 0.2,
            "suffix_decoding_max_cached_requests": 0,
        },
    }
    for proposer, settings in told.items():
        assert proposer_from(target, SpeculativeConfig("suffix", **settings)) == proposer
    longer = SpeculativeConfig("prediction", num_speculative_tokens=9)
    assert proposer_from(target, longer) == ej.Prediction(length=9)

    short, long = (
        one(answers("--prompt", PRINTABLE, "--speculative-config", c))
        for c in ('{"method": "ngram", "num_speculative_tokens": 1}', '{"method": "ngram"}')
    )
    assert short["token_ids"] == long["token_ids"]
    assert short["stats"]["num_draft_tokens"] < long["stats"]["num_draft_tokens"]
    assert len(short["stats"]["per_position_acceptance_rate"]) == 1


def test_a_draft_with_another_tokenizer_is_refused(run, model, tmp_path):
    other = write_model(tmp_path / "other", extra_tokens=["zz"])
    status, out, err = run("generate", "--target", model, "--draft", other, "--prompt", "x", "--json")
    assert (status, out) == (2, "")
    assert "another tokenizer" in err
