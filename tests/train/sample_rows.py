"""Rows of training data and the samples that are made of them."""

import numpy as np
from tiny_model import VOCAB, byte_tokenizer
from train_tools import TEMPLATE

from eaglejax.checkpoint.tokenizer import make_tokenizer
from eaglejax.train.samples import (
    Sample,
    samples_of_row,
)


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


def rows_of(row, tokenizer=TOKENIZER):
    return samples_of_row(row, tokenizer, name="data.jsonl, line 1", vocab_size=VOCAB)


def sample_of(length, answers, seed=0, name="s"):
    ids = np.random.default_rng(seed).integers(1, VOCAB, length).astype(np.int32)
    return Sample(ids, np.arange(length) >= length - answers, name)
