"""Control tokens steer the model; no text shows them."""

import dataclasses

import pytest
from tiny_model import SPECIALS, byte_tokenizer

import eaglejax as ej
from eaglejax.checkpoint.tokenizer import make_tokenizer
from eaglejax.speculate.stops import TextStream

TOKENIZER = make_tokenizer(byte_tokenizer(), eos={257}, bos=None, template=None, specials={})
IDS = {name: TOKENIZER.backend.token_to_id(name) for name in SPECIALS}


def test_special_ids_are_the_control_tokens():
    assert TOKENIZER.special_ids == set(IDS.values())


@pytest.mark.parametrize("text", ["plain", "caf\u00e9 \u6f22"])
def test_a_stream_shows_no_control_token_and_counts_all(text):
    ids = TOKENIZER.encode(text)
    # One in front, one inside a character where there is one, one at the end.
    tokens = [IDS["<|im_start|>"], *ids[:-1], IDS["<|im_start|>"], ids[-1], IDS["<|im_end|>"]]
    stream = TextStream(TOKENIZER, ())
    assert not any(stream.push(t) for t in tokens)
    assert stream.text == stream.safe_text == text
    assert stream.kept_tokens() == len(tokens)
    cut = TextStream(TOKENIZER, (text[-1],))
    assert [cut.push(t) for t in tokens].index(True) == len(tokens) - 2
    assert cut.text == text[:-1]


def test_the_end_of_a_text_is_in_its_ids_alone(model):
    target = ej.load_target(model, dtype="float32")
    free = ej.generate(target, "abc", max_new_tokens=12, ignore_eos=True)
    # An ordinary letter that ends texts: it is no control token, and is left out all the same.
    place = next(n for n in range(3, 12) if free.token_ids[n] not in free.token_ids[:n])
    end = free.token_ids[place]
    ended = dataclasses.replace(target, eos_ids=(end,))
    result = ej.generate(ended, "abc", max_new_tokens=12)
    assert (result.token_ids, result.finish_reason) == (free.token_ids[: place + 1], "stop")
    assert result.text == TOKENIZER.decode(free.token_ids[:place])
    *pieces, last = ej.stream(ended, "abc", max_new_tokens=12, rounds_a_chunk=2)
    assert "".join(p.text for p in pieces) == last.text == result.text
    assert [t for p in pieces for t in p.token_ids] == result.token_ids


def test_a_control_token_that_a_model_writes_is_no_text(model):
    target = ej.load_target(model, dtype="float32")
    always = ej.Sampling(logit_bias={IDS["<|im_start|>"]: 1e4})
    result = ej.generate(target, "abc", max_new_tokens=4, sampling=always)
    assert result.token_ids == [IDS["<|im_start|>"]] * 4
    assert result.text == ""
