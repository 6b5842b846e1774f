"""Rows to samples to packed batches: what is supervised, what is kept, where everything lands."""

import json

import numpy as np
import pytest
import tokenizers
from sample_rows import CHAT, REWRITING, TOKENIZER, rows_of, tokenizer_with
from tiny_model import VOCAB, byte_tokenizer
from train_tools import TEMPLATE

from eaglejax.checkpoint.tokenizer import make_tokenizer
from eaglejax.errors import RequestError
from eaglejax.train.render import NotServed
from eaglejax.train.samples import (
    NOT_SERVED,
    preview,
    read_samples,
    samples_of_row,
)

TRIMMING = TEMPLATE.replace("{{ m.content }}", "{{ m.content.strip() }}")
SHOUTING = TEMPLATE.replace("{{ m.content }}", "{{ m.content.upper() }}")


def supervised_text(sample, tokenizer=TOKENIZER):
    runs = np.flatnonzero(np.diff(np.r_[0, sample.supervised.astype(int), 0]))
    return [tokenizer.decode(sample.ids[a:b].tolist()) for a, b in zip(runs[::2], runs[1::2], strict=True)]


def test_every_assistant_turn_and_its_end_token_are_supervised_and_nothing_else():
    (sample,) = rows_of({"messages": CHAT})
    assert supervised_text(sample) == ["Hello.<|im_end|>", "No more.<|im_end|>"]
    # Up to the answer the ids are those that serving sends.
    prompt = TOKENIZER.apply_chat_template(CHAT[:2])
    assert sample.ids[: len(prompt)].tolist() == prompt == sample.prompt.tolist()


def test_sharegpt_rows_mean_the_same_and_a_leading_answer_is_dropped():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    (wanted,), (found,) = rows_of({"messages": CHAT}), rows_of({"id": "x", "conversations": turns})
    assert found.key == wanted.key
    (led,) = rows_of({"conversations": [{"from": "gpt", "value": "Ha"}, *turns[1:]]})
    assert supervised_text(led) == ["Hello.<|im_end|>", "No more.<|im_end|>"]


def test_a_template_that_rewrites_history_gives_one_row_a_turn_without_its_own_insertions():
    tokenizer = tokenizer_with(REWRITING)
    first, second = rows_of({"messages": CHAT}, tokenizer)
    assert supervised_text(first, tokenizer) == ["Hello.<|im_end|>"]
    assert supervised_text(second, tokenizer) == ["No more.<|im_end|>"]
    # The second row's history is what serving would send: no reasoning block in the earlier turn.
    assert "<think>" not in tokenizer.decode(second.ids[: len(second.ids) - 40].tolist())


def test_an_answer_that_begins_with_line_ends_does_not_change_the_prompts_ids():
    """A tokenizer that merges line ends would make one token of the prompt's last one and the answer's."""
    backend = byte_tokenizer()
    letters = {backend.id_to_token(i): i for i in range(256)}
    end = backend.id_to_token(backend.encode("\n").ids[0])
    backend.model = tokenizers.models.BPE({**letters, end * 2: VOCAB}, [(end, end)])
    tokenizer = make_tokenizer(backend, eos=set(), bos=None, template=TEMPLATE, specials={})
    talk = [CHAT[1], {"role": "assistant", "content": "\n\nHello"}]
    (sample,) = samples_of_row({"messages": talk}, tokenizer, name="row", vocab_size=VOCAB + 1)
    prompt = tokenizer.apply_chat_template(talk[:1])
    assert sample.prompt.tolist() == prompt
    assert supervised_text(sample, tokenizer) == ["\n\nHello<|im_end|>"]
    assert len(tokenizer.encode("\n\n")) == 1
    # Asked on, the conversation is sent as one text, in which they are one token: another row.
    more = [*talk, *CHAT[3:]]
    first, second = samples_of_row({"messages": more}, tokenizer, name="row", vocab_size=VOCAB + 1)
    assert first.key == sample.key
    assert second.prompt.tolist() == tokenizer.apply_chat_template(more[:3])


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents[0].text }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{% if not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "{{ m.name }} {{ m.tool_call_id }} {% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_a_row_keeps_every_field_that_the_template_reads():
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "abc", "function": {"name": "f"}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "abc", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    tokenizer = tokenizer_with(WITH_TOOLS)
    row = {"messages": talk, "documents": [{"text": "D"}]}
    (sample,) = rows_of(row | {"tools": json.dumps(tools)}, tokenizer)
    assert supervised_text(sample, tokenizer) == [f"{json.dumps(call)}<|im_end|>", "Seven.<|im_end|>"]
    variables = {"tools": tools, "documents": row["documents"]}
    assert sample.prompt.tolist() == tokenizer.apply_chat_template(talk[:1], **variables)
    served = tokenizer.apply_chat_template(talk[:3], **variables)
    assert sample.ids[: len(served)].tolist() == served
    with pytest.raises(RequestError, match="does not read 'thinking'; it reads documents, enable_thinking"):
        rows_of(row | {"chat_template_kwargs": {"thinking": True}}, tokenizer)


OPENS_REASONING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
EMPTY_REASONING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
TRAILING_SPACE = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n{{ ' ' }}{% endif %}")


@pytest.mark.parametrize("template", [OPENS_REASONING, EMPTY_REASONING, TRAILING_SPACE])
def test_rows_behind_another_text_than_serving_sends_are_left_out_and_counted(tmp_path, template):
    tokenizer = tokenizer_with(template)
    asked = {"messages": CHAT}
    with pytest.raises(NotServed, match=r"line 1.*another text than serving sends"):
        rows_of(asked, tokenizer)
    good = {"prompt_ids": tokenizer.apply_chat_template(CHAT[:2]), "completion_ids": [72, 262]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [asked, good, asked])))
    samples, report = read_samples(path, tokenizer, vocab_size=VOCAB)
    assert len(samples) == 1
    assert report.dropped == {NOT_SERVED: 2}


def test_a_row_behind_an_opened_reasoning_block_begins_with_what_serving_sends():
    """The form of published reasoning models whose answers are rendered with their reasoning."""
    template = OPENS_REASONING.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think>\n{% endif %}{{ m.content }}"
    )
    tokenizer = tokenizer_with(template)
    answers = [{"role": "assistant", "content": f"so\n</think>\n\n{n}"} for n in range(2)]
    rows = rows_of({"messages": [CHAT[1], answers[0], CHAT[3], answers[1]]}, tokenizer)
    assert [supervised_text(r, tokenizer) for r in rows] == [
        [f"so\n</think>\n\n{n}<|im_end|>"] for n in range(2)
    ]
    assert rows[0].prompt.tolist() == tokenizer.apply_chat_template([CHAT[1]])
    assert rows[1].prompt.tolist() == tokenizer.apply_chat_template([CHAT[1], answers[0], CHAT[3]])


@pytest.mark.parametrize("answer", ["think", "hi", "</think>"])
def test_an_answer_that_the_templates_own_insertion_holds_too_is_found_behind_it(answer):
    tokenizer = tokenizer_with(REWRITING)
    (sample,) = rows_of({"messages": [CHAT[1], {"role": "assistant", "content": answer}]}, tokenizer)
    assert supervised_text(sample, tokenizer) == [f"{answer}<|im_end|>"]


def test_a_template_that_trims_still_finds_its_answer_and_one_that_changes_it_is_refused():
    (sample,) = rows_of(
        {"messages": [CHAT[1], {"role": "assistant", "content": "  Yes \n"}]}, tokenizer_with(TRIMMING)
    )
    assert supervised_text(sample) == ["Yes<|im_end|>"]
    with pytest.raises(RequestError, match=r"line 1.*turn 1"):
        rows_of({"messages": [CHAT[1], {"role": "assistant", "content": "Yes"}]}, tokenizer_with(SHOUTING))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": CHAT[:2]}, "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role 'wizard'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role \\['user'\\]"),
        (
            {"prompt_ids": [1], "completion_ids": [2], "conversation": "x"},
            "a prompt's digest",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "no text"),
        ({"prompt_ids": [1], "completion_ids": []}, "nothing is supervised"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "equally many"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "nothing is supervised"),
        # A list of labels, whose ids and -100 would all count as true.
        ({"input_ids": [1, 2], "loss_mask": [-100, 2]}, "1 for tokens of an answer"),
        ({"prompt_ids": [1], "completion_ids": [VOCAB]}, f"0..{VOCAB - 1}"),
        ({"prompt_ids": [1], "completion_ids": [10**30]}, f"0..{VOCAB - 1}"),
        ({"prompt_ids": [True], "completion_ids": [1]}, "a list of integers"),
        ({"messages": [CHAT[1], {"role": "assistant", "content": "\ud800"}]}, "no valid Unicode"),
        ({"messages": CHAT, "tools": "[" * 9999}, "its tools are not usable JSON"),
        ({"text": "x"}, "training row has"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_the_row_named(row, words):
    with pytest.raises(RequestError, match=f"line 1.*{words}"):
        rows_of(row)


def test_bad_rows_are_counted_and_a_file_of_nothing_else_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
    path.write_text("\n".join([json.dumps(good), "{", json.dumps({"messages": CHAT[:2]})]) + "\n")
    samples, report = read_samples(path, TOKENIZER, vocab_size=VOCAB)
    assert (len(samples), report.rows, sum(report.dropped.values())) == (1, 3, 2)
    assert "line 2" in report.lines()[0]
    path.write_text(json.dumps(good) + "\n" + '{"prompt_ids": [' + "1" * 5000 + "]}\n" + "[" * 99999 + "\n")
    samples, report = read_samples(path, TOKENIZER, vocab_size=VOCAB)
    assert (len(samples), report.dropped.total()) == (1, 2)
    assert "line 2: not usable JSON: it holds a number of too many digits" in report.lines()[0]
    assert samples[0].ids.tolist() == [5, 6, 7, 8]
    path.write_text(json.dumps({"messages": CHAT[:2]}) + "\n")
    with pytest.raises(RequestError, match="line 1"):
        read_samples(path, TOKENIZER, vocab_size=VOCAB)


def green_text(shown):
    return [shown.plain[s.start : s.end] for s in shown.spans if "green" in str(s.style)]


def test_the_preview_shows_supervised_text_in_another_style_behind_prompts_of_any_length():
    (sample,) = rows_of({"messages": CHAT})
    assert green_text(preview(sample, TOKENIZER)) == supervised_text(sample)
    (long,) = rows_of({"messages": [{"role": "user", "content": "far " * 500}, CHAT[2]]})
    shown = preview(long, TOKENIZER, 200)
    assert len(shown.plain) <= 200
    assert green_text(shown) == ["Hello.<|im_end|>"]
