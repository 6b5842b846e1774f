"""Answers of the target: exact ids, kills that lose nothing, rows that cannot be asked."""

import dataclasses
import functools
import json

import pytest
from train_tools import tiny_folder

from eaglejax.checkpoint.target import load_target
from eaglejax.errors import ConfigError
from eaglejax.train import regenerate as module
from eaglejax.train.regenerate import RegenerateOptions, read_prompt_rows, regenerate
from eaglejax.train.samples import prompt_digest, read_samples

OPTIONS = RegenerateOptions(temperature=0.7, max_new_tokens=6, batch_size=2, turns=2, max_prompt_tokens=90)
ROWS = [
    {"id": "a", "turns": ["Hi?", "And?"]},
    {"id": "b", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Ho"}]},
    {"id": "long", "prompt": "x" * 100},
    {"id": "c", "conversations": [{"from": "human", "value": "Why"}, {"from": "gpt", "value": "not used"}]},
    {"id": "bad", "turns": []},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ROWS) + "\nnot json\n")
    return path


@pytest.fixture(scope="module")
def whole(target, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return out, regenerate(target, read_prompt_rows(prompts), out, OPTIONS)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_answers_carry_exact_ids_and_the_rest_is_counted(whole, target):
    out, counts = whole
    rows = lines(out)
    assert {r["id"] for r in rows} == {"a", "b", "c"}
    assert (counts.written, counts.too_long, counts.failed) == (len(rows), 1, 2)
    errors = lines(out.with_name(out.name + ".errors.jsonl"))
    assert len(errors) == 2
    assert "line 5" in errors[0]["error"]
    for row in rows:
        assert 1 <= len(row["completion_ids"]) <= 6
        assert (row["finish_reason"] == "stop") == (row["completion_ids"][-1] in target.eos_ids)
    b = next(r for r in rows if r["id"] == "b")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Ho"}]
    assert b["prompt_ids"] == target.tokenizer.apply_chat_template(messages)
    samples, report = read_samples(out, target.tokenizer, vocab_size=target.config.vocab_size)
    assert len(samples) == len(rows)
    assert not report.dropped


def test_a_conversation_with_tools_is_asked_whole(tmp_path):
    """What a tool said belongs to the call on record: every answer is asked for behind what stands there."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "1", "function": {"name": "f"}}
    talk = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": talk, "tools": tools, "chat_template_kwargs": {"think": False}},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, talk[1]]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_prompt_rows(path)
    assert [m for ask in first.asks for m in ask] == [talk[0], talk[1], talk[3] | {"content": "7"}]
    assert first.recorded == (talk[2] | {"content": ""}, None)
    assert first.variables == {"tools": tools, "think": False}
    assert [[m["content"] for m in ask] for ask in second.asks] == [["a"], ["b", "Hi"]]
    assert second.recorded == (None, None)


def test_what_the_template_reads_reaches_it(tmp_path):
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if not think %}quick{% endif %}>"
    )
    target = load_target(tiny_folder(tmp_path / "model", template=template), dtype="float32")
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "7"},
    ]
    tools = [{"function": {"name": "f"}}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"messages": talk, "tools": tools}))
    options = dataclasses.replace(OPTIONS, turns=1, chat_template_kwargs={"think": True})
    regenerate(target, read_prompt_rows(prompts), out, options)
    render = functools.partial(target.tokenizer.apply_chat_template, tools=tools, think=True)
    assert [r["prompt_ids"] for r in lines(out)] == [render(talk[:1]), render(talk)]


def test_a_killed_run_writes_what_it_would_have_written(whole, target, prompts, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    real, calls = module.decode_requests, []

    def dying(*args, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(module, "decode_requests", dying)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, read_prompt_rows(prompts), out, OPTIONS)
    before = len(lines(out))
    assert before > 0
    with out.open("a") as file:
        file.write('{"id": "a", "cut')
    counts = regenerate(target, read_prompt_rows(prompts), out, OPTIONS)
    assert counts.known == before
    key = {r["key"]: r["completion_ids"] for r in lines(whole[0])}
    assert {r["key"]: r["completion_ids"] for r in lines(out)} == key
    again = regenerate(target, read_prompt_rows(prompts), out, OPTIONS)
    assert again.written == 0


def test_rows_that_ask_the_same_are_answered_once_and_any_text_can_be_gone_on_from(target, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": n, "turns": ["Hi?", "And?"]} for n in range(3)] + [{"id": "bad\ud800", "prompt": "x"}]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))

    def run():
        return regenerate(target, read_prompt_rows(prompts), out, OPTIONS)

    first = run()
    found = lines(out)
    assert len({r["key"] for r in found}) == len(found) == first.written
    assert first.written + first.known >= 3
    assert {r["conversation"] for r in found} == {prompt_digest(found[0]["prompt_ids"])}
    # Separators that Unicode counts as line ends, which JSON does not escape.
    found[0]["text"] = "one\u2028two\x85three"
    # The last line lacks its end alone, as editors leave it.
    out.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in found), encoding="utf-8")
    again = run()
    assert (again.written, again.known, again.failed) == (0, first.written + first.known, 1)
    assert len(lines(out.with_name(out.name + ".errors.jsonl"))) == 1
    rows.append({"prompt": "Another"})
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert run().written == 1
    assert len(lines(out)) == len(found) + 1
    prompts.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        run()


def test_other_settings_are_other_answers_and_foreign_files_are_refused(target, prompts, tmp_path):
    key = module._key([1, 2], OPTIONS, "m")
    for change in ({"temperature": 0.0}, {"seed": 1}, {"max_new_tokens": 7}):
        assert module._key([1, 2], dataclasses.replace(OPTIONS, **change), "m") != key
    out = tmp_path / "other.jsonl"
    out.write_text('{"text": "x"}\n')
    with pytest.raises(ConfigError, match=r"line 1 is no answer"):
        regenerate(target, read_prompt_rows(prompts), out, OPTIONS)
    # Nothing of a file that is someone else's is touched, its unfinished last line neither.
    for text in ('{"text": "x"}', '[{"text": "x"},\n {"text"', '{"id": 1, "text": "whole"}', "no json"):
        out.write_text(text)
        with pytest.raises(ConfigError, match=r"line 1 is no answer"):
            regenerate(target, read_prompt_rows(prompts), out, OPTIONS)
        assert out.read_text() == text
    out.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 1"):
        regenerate(target, iter(()), out, OPTIONS)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        regenerate(target, iter(()), tmp_path, OPTIONS)
    with pytest.raises(ConfigError, match="limit is 0"):
        regenerate(target, iter(()), out, OPTIONS, limit=0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        RegenerateOptions(batch_size=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_prompt_rows(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no rows"):
        list(read_prompt_rows(tmp_path / "empty.jsonl"))
