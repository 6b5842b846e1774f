"""Tiny random EAGLE drafts for the tiny model, as checkpoints in folders."""

import jax
import numpy as np
from tiny_model import HIDDEN, VOCAB

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "target_hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "own_embedding": True,
}
EAGLE1 = EagleConfig(version=1, draft_vocab_size=VOCAB, **SHAPE)
EAGLE3 = EagleConfig(
    version=3, draft_vocab_size=96, num_aux=2, aux=(0, 1), head_norm=True, own_head=True, **SHAPE
)


def write_eagle(folder, config, seed=0):
    """Write a random draft; EAGLE-3 drafts know the printable characters and a few more."""
    weights = init_eagle(config, jax.random.key(seed))
    ids = np.arange(config.draft_vocab_size) if config.reduced else None
    form = "safeailab" if config.version == 1 else "speculators"
    write_draft(folder, config, tensors_of_weights(config, weights), ids, to=form)
    return str(folder)
