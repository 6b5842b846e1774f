"""Rows to samples to packed batches: what is supervised, what is kept, where everything lands."""

import json
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import VOCAB, byte_tokenizer
from train_tools import TEMPLATE

from eaglejax.checkpoint.tokenizer import make_tokenizer
from eaglejax.errors import ConfigError, RequestError
from eaglejax.train.batch import row_mask
from eaglejax.train.curate import (
    Contamination,
    decontaminate,
    deduplicate,
    evaluation_texts,
    mix,
    split_validation,
    windows,
)
from eaglejax.train.packing import assemble, batch_stream, pack
from eaglejax.train.render import NotServed
from eaglejax.train.samples import (
    NOT_SERVED,
    Report,
    Sample,
    preview,
    prompt_digest,
    read_samples,
    samples_of_row,
)
from eaglejax.train.vocab import build_vocab_map, count_all, count_supervised, given_vocab_map


def tokenizer_with(template):
    return make_tokenizer(
        byte_tokenizer(), eos=set(), bos=None, template=template, specials={"eos_token": "<|endoftext|>"}
    )


TOKENIZER = tokenizer_with(TEMPLATE)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No more."},
]
# Like a family that shows its reasoning block in the last turn alone, empty when there is none.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = TEMPLATE.replace("{{ m.content }}", "{{ m.content.strip() }}")
SHOUTING = TEMPLATE.replace("{{ m.content }}", "{{ m.content.upper() }}")


def rows_of(row, tokenizer=TOKENIZER):
    return samples_of_row(row, tokenizer, name="data.jsonl, line 1", vocab_size=VOCAB)


def supervised_text(sample, tokenizer=TOKENIZER):
    runs = np.flatnonzero(np.diff(np.r_[0, sample.supervised.astype(int), 0]))
    return [tokenizer.decode(sample.ids[a:b].tolist()) for a, b in zip(runs[::2], runs[1::2], strict=True)]


def sample_of(length, answers, seed=0, name="s"):
    ids = np.random.default_rng(seed).integers(1, VOCAB, length).astype(np.int32)
    return Sample(ids, np.arange(length) >= length - answers, name)


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


@settings(max_examples=40, deadline=None)
@given(st.integers(30, 90), st.integers(1, 30), st.integers(12, 20), st.integers(5, 8))
def test_every_pair_of_a_cut_text_is_trained_exactly_once_at_every_step(total, answers, length, overlap):
    sample = sample_of(total, min(answers, total - 1))
    length, steps = min(length, total), overlap - 1
    for step in range(steps):
        whole = row_mask(assemble([sample], 96), step)
        seen = np.zeros(total, int)
        for part in windows(sample, length, overlap):
            assert len(part) <= length
            start = 0 if part is sample else int(part.name.split("tokens ")[1].split("-")[0])
            rows = np.flatnonzero(row_mask(assemble([part], 96), step)[0])
            np.add.at(seen, start + rows, 1)
        assert seen.tolist() == np.asarray(whole[0, :total]).astype(int).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=40))
def test_packing_places_every_sample_once_and_wastes_less_than_half(lengths):
    rows = pack(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fill = [sum(lengths[i] for i in row) for row in rows]
    assert max(fill) <= 32
    assert sum(f <= 16 for f in fill) <= 1


def test_a_packed_row_keeps_tokens_marks_and_features_together():
    samples = [sample_of(5, 2, 1), sample_of(4, 3, 2)]
    beside = [{"hidden": s.ids[:, None] * np.ones(3, np.float32)} for s in samples]
    batch = assemble(samples, 12, beside)
    assert batch.documents[0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]
    assert np.array_equal(batch.hidden[0, :, 0], batch.tokens[0])
    assert np.flatnonzero(batch.supervised[0]).tolist() == [3, 4, 6, 7, 8]
    with pytest.raises(ConfigError, match="5 tokens do"):
        pack([5], 4)


def test_the_stream_goes_on_from_a_saved_position_and_reshuffles_each_epoch():
    samples = [sample_of(6, 3, n) for n in range(10)]

    def stream():
        return batch_stream(samples, capacity=6, rows=2, seed=4)

    whole = stream()
    first = [next(whole).tokens for _ in range(3)]
    state = whole.get_state()
    rest = [next(whole).tokens for _ in range(7)]
    again = stream()
    again.set_state(json.loads(json.dumps(state)))
    assert all(np.array_equal(a, next(again).tokens) for a in rest)
    epochs = np.concatenate([*first, *rest])[:, 0].reshape(2, 10)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(int(s.ids[0]) for s in samples)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_the_stream_reads_ahead_a_few_batches_and_not_hundreds():
    """A batch of a large target's features takes a gigabyte."""
    samples, read = [sample_of(6, 3, n) for n in range(10)], []

    def features(sample):
        read.append(sample)
        return {"hidden": np.zeros((len(sample), 2), np.float32)}

    stream = batch_stream(samples, capacity=6, rows=1, seed=0, features=features)
    next(stream)
    time.sleep(0.5)
    assert 1 <= len(read) <= 12


def test_duplicates_and_evaluation_texts_leave_with_their_count(tmp_path):
    report = Report()
    a, b = sample_of(8, 3, 1), sample_of(8, 3, 2)
    other_answer = Sample(np.r_[a.ids[:5], 1, 2, 3].astype(np.int32), a.supervised, "other")
    assert deduplicate([a, b, a, other_answer], report) == [a, b, other_answer]
    assert deduplicate([a, b, other_answer], report, by="prompt") == [a, b]
    path = tmp_path / "eval.jsonl"
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    path.write_text(json.dumps({"turns": [long, "Name six words that rhyme well."]}) + "\n")
    contamination = Contamination(evaluation_texts(path))
    assert contamination.matches(
        "He said: TWO three four, five six seven eight nine ten eleven twelve thirteen fourteen!"
    )
    assert not contamination.matches("two three four five six seven eight nine ten eleven twelve thirteen")
    assert contamination.matches("please name six words that rhyme well")
    assert not contamination.matches("name six words that rhyme")
    assert Contamination(["小明有三个苹果又买了五个请问一共几个"]).matches(
        "题：小明有三个苹果，又买了五个，请问一共几个？"
    )
    # Letters and digits of other scripts beside it do not make one word of what is one a character.
    assert Contamination(["用 Python 写 3 个函数 来 计算 平均数"]).matches(
        "请用Python写3个函数来计算平均数吧"
    )
    texts = [long, "nothing of the kind"]
    samples = [Sample(np.asarray(TOKENIZER.encode(t), np.int32), np.ones(len(t), bool), t) for t in texts]
    assert [s.name for s in decontaminate(samples, contamination, TOKENIZER, report)] == texts[1:]
    assert sum(report.dropped.values()) == 3
    for row, words in (
        ({"question": "x"}, "line 1 has neither"),
        ({"turns": "one text, read letter by letter"}, "line 1 is no prompt row: its turns are no list"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "its prompts are no texts"),
        ({"messages": [{"role": "user"}]}, "line 1 is no prompt row"),
    ):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(ConfigError, match=words):
            evaluation_texts(path)
    path.write_text(json.dumps({"prompt": "one line\u2028of two"}, ensure_ascii=False) + "\n")
    assert evaluation_texts(path) == ["one line\u2028of two"]


def test_mixing_keeps_the_proportions_and_repeats_only_when_told():
    sources = {
        "a": [sample_of(4, 1, n, "a") for n in range(30)],
        "b": [sample_of(4, 1, n, "b") for n in range(9)],
    }
    once = mix(sources, {"a": 2, "b": 1}, seed=1)
    assert [sum(s.name == n for s in once) for n in "ab"] == [18, 9]
    assert len({id(s) for s in once}) == 27
    assert [id(s) for s in once] == [id(s) for s in mix(sources, {"a": 2, "b": 1}, seed=1)]
    more = mix(sources, {"a": 1, "b": 1}, seed=1, total=40)
    assert [sum(s.name == n for s in more) for n in "ab"] == [20, 20]
    # Shares that are no whole numbers still make the total, and a quotient that is rounded none less.
    three = dict.fromkeys("abc", sources["a"])
    assert [len(mix(three, dict.fromkeys(three, 1), seed=1, total=n)) for n in (1, 10, 11)] == [1, 10, 11]
    some = {"a": sources["a"][:3], "b": sources["a"][:27]}
    assert len(mix(some, {"a": 0.1, "b": 0.9}, seed=1)) == 30
    with pytest.raises(ConfigError, match="positive"):
        mix(sources, {"a": 1, "b": 0}, seed=1)
    with pytest.raises(ConfigError, match="differ in c"):
        mix(sources, {"a": 1, "b": 1, "c": 1}, seed=1)


def test_the_same_prompt_is_always_on_the_same_side():
    samples = [sample_of(8, 3, n % 50) for n in range(100)]
    train, held = split_validation(samples, 0.3)
    assert len(train) + len(held) == 100
    assert not {s.key for s in train} & {s.key for s in held}
    assert {s.key for s in split_validation(samples[:10], 0.3)[1]} <= {s.key for s in held}


def test_texts_without_a_prompt_are_not_one_conversation():
    texts = [rows_of({"input_ids": [n, n + 1, 9], "loss_mask": [1, 1, 1]})[0] for n in range(40)]
    train, held = split_validation(texts, 0.5)
    assert train
    assert held
    assert deduplicate([*texts, texts[0]], Report(), by="prompt") == texts


def test_the_turns_of_one_conversation_are_on_the_same_side():
    """A later turn holds the earlier answers as its prompt: trained on, they would be no held-out text."""
    tokenizer = tokenizer_with(REWRITING)
    sides = set()
    for n in range(40):
        talk = [{"role": "user", "content": f"Hi {n}?"}, *CHAT[2:]]
        turns = rows_of({"messages": talk}, tokenizer)
        assert len(turns) == 2
        assert turns[0].prompt.tolist() != turns[1].prompt.tolist()
        found = split_validation(turns, 0.5)
        assert sorted(map(len, found)) == [0, 2]
        sides.add(len(found[0]))
    assert sides == {0, 2}
    # Answers of `regenerate` say which conversation they belong to; without that the prompt decides.
    row = {"prompt_ids": [5, 6, 7], "completion_ids": [8]}
    (alone,), (later,) = rows_of(row), rows_of({**row, "conversation": turns[0].group})
    assert alone.group == prompt_digest(alone.prompt)
    assert later.group == turns[0].group != alone.group


def test_the_vocabulary_holds_what_is_supervised_most_and_reports_its_coverage():
    sample = Sample(np.asarray([9, 9, 5, 5, 5, 7, 3], np.int32), np.asarray([1, 0, 1, 1, 1, 1, 1], bool), "s")
    counts = count_supervised([sample], 12)
    assert (counts[5], counts[9]) == (3, 1)
    found = build_vocab_map(counts, 2, tokenizer_hash="t")
    assert found.ids.tolist() == [3, 5]
    assert found.coverage == pytest.approx(4 / 6)
    # More places than distinct tokens: filled with the lowest ids.
    assert build_vocab_map(counts, 6, tokenizer_hash="t").ids.tolist() == [0, 1, 3, 5, 7, 9]
    # What the prompt holds counts a little: 9 is as common as 7 and 3 in the answer, and was asked about.
    asked = build_vocab_map(counts, 2, tokenizer_hash="t", prior=0.1 * count_all([sample], 12))
    assert asked.ids.tolist() == [5, 9]
    assert asked.coverage == pytest.approx(4 / 6)
    assert asked.key != found.key
    assert found.key != build_vocab_map(counts, 2, tokenizer_hash="u").key
    assert given_vocab_map(np.asarray([5, 9]), counts).coverage == pytest.approx(4 / 6)
    with pytest.raises(ConfigError, match=r"1\.\.12"):
        build_vocab_map(counts, 13, tokenizer_hash="t")
