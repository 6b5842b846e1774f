"""A tiny target with a tiny draft, and suites of prompts in two languages."""

import json

import jax
import numpy as np
import pytest
from tiny_model import HEAD_DIM, HEADS, HIDDEN, VOCAB, write_model

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle

DRAFT = EagleConfig(
    version=3,
    vocab_size=VOCAB,
    draft_vocab_size=96,
    hidden_size=HIDDEN,
    target_hidden_size=HIDDEN,
    intermediate_size=24,
    num_heads=HEADS,
    num_kv_heads=HEADS // 2,
    head_dim=HEAD_DIM,
    num_aux=2,
    aux=(0, 1),
    head_norm=True,
    own_head=True,
)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="session")
def model(place):
    return write_model(place / "model")


@pytest.fixture(scope="session")
def draft(place):
    tensors = tensors_of_weights(DRAFT, init_eagle(DRAFT, jax.random.key(0)))
    write_draft(place / "draft", DRAFT, tensors, np.arange(96), to="eaglejax")
    return str(place / "draft")


@pytest.fixture(scope="session")
def suites(place):
    rows = {
        "talk": [{"turns": ["Hi?", "And?"], "lang": "en"}, {"turns": ["Yo"], "lang": "zh"}],
        "code": [{"id": "f", "prompt": "def", "lang": "en"}, {"prompt": "x = "}],
    }
    paths = []
    for name, content in rows.items():
        paths.append(place / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in content))
    return [str(path) for path in paths]
