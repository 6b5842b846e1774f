"""A tiny target in a folder, tiny drafts, random batches."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_model import HEAD_DIM, HEADS, HIDDEN, VOCAB, write_model

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.train.batch import Batch

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 12}
"""A small mixture as wide, for a token, as the dense MLP of ``draft_config``."""


def tiny_folder(folder, *, template=TEMPLATE, seed=0):
    return write_model(folder, seed=seed, layers=4, template=template)


def draft_config(**changes):
    settings = {
        "version": 3,
        "vocab_size": VOCAB,
        "draft_vocab_size": 64,
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_heads": HEADS,
        "num_kv_heads": HEADS // 2,
        "head_dim": HEAD_DIM,
        "num_aux": 3,
        "aux": (2, 3, 4),
        "head_norm": True,
        "own_head": True,
    }
    return EagleConfig(**(settings | changes))


def packed(*lengths, capacity, answers=0.6, seed=0, aux=3, vocab=VOCAB):
    """One packed row of documents of ``lengths`` tokens with random features; the last ``answers`` of each is
    supervised."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((1, capacity), np.int32)
    documents, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    supervised = np.zeros((1, capacity), bool)
    at = 0
    for n, length in enumerate(lengths):
        here = slice(at, at + length)
        tokens[0, here] = rng.integers(1, vocab, length)
        documents[0, here], positions[0, here] = n + 1, np.arange(length)
        supervised[0, at + length - int(answers * length) : at + length] = True
        at += length
    real = documents[..., None] > 0
    hidden = np.where(real, rng.normal(size=(1, capacity, HIDDEN)), 0).astype(np.float32)
    boundaries = np.where(real[..., None], rng.normal(size=(1, capacity, aux, HIDDEN)), 0)
    return Batch(
        jnp.asarray(tokens),
        jnp.asarray(documents),
        jnp.asarray(positions),
        jnp.asarray(supervised),
        jnp.asarray(boundaries, jnp.float32),
        jnp.asarray(hidden),
    )


def leaves_equal(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
