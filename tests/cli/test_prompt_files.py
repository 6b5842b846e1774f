"""Prompt files and speculative configurations, as people write them."""

import json

import pytest

from eaglejax.config import BadRow, PromptRow, SpeculativeConfig, parse_speculative_config, read_prompts
from eaglejax.conversation import Conversation, read_messages
from eaglejax.errors import ConfigError, RequestError


def test_every_kind_of_row(rows_file):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = read_prompts(
        rows_file(
            {"id": "a", "turns": ["one", "two"], "other": 1},
            b"",
            {"prompt": "text with \u2028 inside"},
            {"id": 7, "messages": talk},
        )
    )
    assert [r.id for r in rows] == ["a", 3, 7]
    assert rows[0].request(["1"], chat=False).messages == (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    )
    assert rows[0].count == 2
    assert rows[1].request([], chat=False) == "text with \u2028 inside"
    assert rows[1].request([], chat=True).messages == (
        {"role": "user", "content": "text with \u2028 inside"},
    )
    assert list(rows[2].request([], chat=False).messages) == talk


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}


def test_rows_keep_what_the_chat_template_may_read(rows_file):
    told = {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "a"}]}
    talk = [{"role": "user", "content": "u", "x": [1]}, CALL, told]
    fields = {
        "tools": json.dumps(TOOLS),
        "documents": [{"text": "d"}],
        "chat_template_kwargs": {"think": False},
    }
    messages, shared, turns, prompt = read_prompts(
        rows_file(
            {"messages": talk} | fields,
            {"conversations": [{"from": "human", "value": "u"}]} | fields,
            {"turns": ["u"], "tools": []} | {"chat_template_kwargs": {"think": False}},
            {"prompt": "u"} | fields,
        )
    )
    variables = {"tools": TOOLS, "documents": [{"text": "d"}], "think": False}
    asked = messages.request([], chat=False)
    assert asked.variables == variables
    assert list(asked.messages) == [talk[0], CALL | {"content": ""}, told | {"content": "a"}]
    assert shared.request([], chat=False) == Conversation(({"role": "user", "content": "u"},), variables)
    assert turns.request([], chat=False).variables == {"think": False}
    assert prompt.request([], chat=True).variables == variables
    with pytest.raises(RequestError, match=r"tools, documents, think beside a plain prompt"):
        prompt.request([], chat=False)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b", "cache_control": {}}], "a b"),
    ],
)
def test_contents_are_texts_whatever_their_form(content, text):
    assert read_messages([{"role": "user", "content": content}])[0]["content"] == text
    assert read_messages([{"from": "human", "value": content}])[0] == {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "text part 0"),
        ({"role": "user", "content": [{"text": "a"}]}, "part 0 is an object"),
        ({"role": "user", "content": 5}, "no text, but a number"),
        ({"role": "user", "content": {"a": 1}}, "no text, but an object"),
        ({"role": "user", "content": b"a"}, "no text, but of type bytes"),
        ({"role": "wizard", "content": "a"}, "role 'wizard'"),
        ({"role": "assistant"}, "message 0 \\(assistant\\) has no 'content'"),
    ],
)
def test_messages_that_cannot_be_are_refused_by_name(message, reason):
    with pytest.raises(RequestError, match=reason):
        read_messages([message])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": {"a": 1}}, "tools are a list of objects"),
        ({"tools": "[1]"}, "tools are a list of objects"),
        ({"documents": "{"}, "documents are not valid JSON"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is an object"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages', which is no variable"),
        ({"tools": TOOLS, "chat_template_kwargs": {"tools": TOOLS}}, "'tools' is given twice"),
    ],
)
def test_fields_for_the_template_that_cannot_be_cost_their_row(rows_file, fields, reason):
    for row in ({"prompt": "a"}, {"turns": ["a"]}, {"messages": [{"role": "user", "content": "a"}]}):
        (bad,) = read_prompts(rows_file(row | fields))
        assert reason in bad.error


def test_crlf_and_byte_order_mark_are_no_content(rows_file):
    rows = read_prompts(rows_file(b'\xef\xbb\xbf{"prompt": "a"}\r', b'{"prompt": "b"}\r'))
    assert [r.prompt for r in rows] == ["a", "b"]


BAD = [
    ("{", "not valid JSON"),
    ('{"prompt": "a"} {}', "Extra data"),
    ("[" * 100_000, "nested too deeply"),
    ('["a"]', "this is a list"),
    ({}, "this has none of them"),
    ({"prompt": "a", "turns": ["b"]}, "'prompt' and 'turns'"),
    ({"prompt": 5}, "'prompt' is a string, not a number (5)"),
    ({"prompt": ""}, "'prompt' is empty"),
    ({"turns": []}, "non-empty list"),
    ({"turns": "a"}, "'turns' is a non-empty list"),
    ({"turns": ["a", None]}, "turn 1 is a string, not null"),
    ({"messages": [{"role": "user"}]}, "message 0"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "content of message 0"),
    ({"id": {"a": 1}, "prompt": "a"}, "'id'"),
    ({"id": True, "prompt": "a"}, "'id'"),
    ({"prompt": "a", "guess": 3}, "'guess'"),
    ({"turns": ["a", "b"], "guess": ["x"]}, "1 entries for 2 turns"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_row_names_its_line_and_leaves_the_others(rows_file, row, reason):
    path = rows_file({"prompt": "before", "guess": "g"}, row, {"prompt": "after"})
    before, bad, after = read_prompts(path, prediction_field="guess")
    assert isinstance(bad, BadRow)
    assert f"{path}, line 2: " in bad.error
    assert reason in bad.error
    assert (before.prompt, after.prompt) == ("before", "after")


def test_the_identity_of_a_bad_row_is_its_own(rows_file):
    (bad,) = read_prompts(rows_file({"id": "mine", "prompt": 1}))
    assert bad.id == "mine"


def test_files_that_are_refused(rows_file, tmp_path):
    with pytest.raises(ConfigError, match=r"line 2: byte 13 is not UTF-8"):
        read_prompts(rows_file({"prompt": "a"}, b'{"prompt": "\xff"}'))
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(rows_file(b"", b"  "))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="limit is 0"):
        read_prompts(rows_file({"prompt": "a"}), limit=0)
    with pytest.raises(ConfigError, match=r"no row of .* 'guess'"):
        read_prompts(rows_file({"prompt": "a"}), prediction_field="guess")


def test_limit_counts_rows(rows_file):
    rows = read_prompts(rows_file(b"", {"prompt": "a"}, "{", {"prompt": "b"}), limit=2)
    assert [type(r) for r in rows] == [PromptRow, BadRow]


def test_predictions_are_per_turn(rows_file):
    path = rows_file(
        {"turns": ["a", "b"], "p": "same"}, {"turns": ["a", "b"], "p": [None, "two"]}, {"prompt": "a"}
    )
    assert [r.predictions for r in read_prompts(path, prediction_field="p")] == [
        ("same", "same"),
        (None, "two"),
        (None,),
    ]


def test_speculative_config_in_the_words_of_vllm():
    given = {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = parse_speculative_config(json.dumps({"method": "ngram", **given}))
    assert config == SpeculativeConfig("ngram", 4, 3, 1)
    assert config.given() == given


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object, not a list"),
        ("{}", "names no 'method'"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "on one device"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "'num_speculative_tokens'"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "not a boolean"),
        ('{"method": null}', "'method'"),
    ],
)
def test_speculative_configs_that_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_speculative_config(text)
