"""Which samples are trained on, and what they make of the draft's vocabulary."""

import json

import numpy as np
import pytest
from sample_rows import CHAT, REWRITING, TOKENIZER, rows_of, sample_of, tokenizer_with

from eaglejax.errors import ConfigError
from eaglejax.train.curate import (
    Contamination,
    decontaminate,
    deduplicate,
    evaluation_texts,
    mix,
    split_validation,
)
from eaglejax.train.samples import (
    Report,
    Sample,
    prompt_digest,
)
from eaglejax.train.vocab import build_vocab_map, count_all, count_supervised, given_vocab_map


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
