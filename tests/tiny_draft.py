"""Tiny random drafts for the tiny model, as checkpoints in folders."""

import jax
import numpy as np
from tiny_model import HIDDEN, VOCAB

from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import write_weights as write_dflash_weights
from eaglejax.drafts.dflash.model import param_table as dflash_table
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.write import write_heads
from eaglejax.drafts.medusa.model import param_table as medusa_table
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.write import write_weights
from eaglejax.drafts.mtp.model import param_table
from eaglejax.pytree import initialize

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


def write_mtp(folder, target, seed=0):
    """Write a random MTP module like the last layer of ``target``."""
    model = target.config
    config = MtpConfig(model.vocab_size, model.hidden_size, model.block(model.num_layers - 1))
    write_weights(folder, config, initialize(param_table(config), jax.random.key(seed)))
    return str(folder)


def write_dflash(folder, seed=0):
    """Write a random DFlash draft that reads the output of the tiny model's block."""
    config = DFlashConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_layers=1,
        aux=(1,),
        block=4,
    )
    write_dflash_weights(folder, config, initialize(dflash_table(config), jax.random.key(seed)))
    return str(folder)


def write_medusa(folder, seed=0):
    """Write three random Medusa heads."""
    config = MedusaConfig(VOCAB, VOCAB, HIDDEN, heads=3)
    write_heads(folder, config, initialize(medusa_table(config), jax.random.key(seed)), None)
    return str(folder)
