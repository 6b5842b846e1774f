"""Tiny targets, random MTP modules for them, and folders of both in every published layout."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from eagle_loop import make_target, target_config

from eaglejax import pytree
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.load import join
from eaglejax.drafts.mtp.model import param_table
from eaglejax.models.config import LayerSpec
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.rope import RopeConfig

GROUPED = make_target(target_config(), seed=6)
LATENT = make_target(
    target_config(
        num_layers=1,
        layers=(
            LayerSpec(mixer=LatentAttention(4, 6, 4, 5, 8, scale=10**-0.5, rope=RopeConfig(), query_rank=7)),
        ),
    ),
    seed=7,
)
H, V = GROUPED.config.hidden_size, GROUPED.config.vocab_size


def modules_for(target, modules=1, seed=0, **changes):
    """(configuration, parameters) of random modules that borrow the target's embedding and head."""
    config = target.config
    made = MtpConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        block=config.block(config.num_layers - 1),
        modules=modules,
        **changes,
    )
    weights = pytree.initialize(param_table(made), jax.random.key(seed))
    weights = jax.tree.map(lambda w: w * 12 if w.ndim > 1 else w + jnp.arange(w.size) / w.size, weights)
    return made, join(made, weights, target)


QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def layer_tensors(rng, at):
    """A Qwen2 layer's tensors, by their published names."""
    d, f = 4, 24
    shapes = {
        "self_attn.q_proj.weight": (4 * d, H),
        "self_attn.k_proj.weight": (2 * d, H),
        "self_attn.v_proj.weight": (2 * d, H),
        "self_attn.o_proj.weight": (H, 4 * d),
        "self_attn.q_proj.bias": (4 * d,),
        "self_attn.k_proj.bias": (2 * d,),
        "self_attn.v_proj.bias": (2 * d,),
        "mlp.gate_proj.weight": (f, H),
        "mlp.up_proj.weight": (f, H),
        "mlp.down_proj.weight": (H, f),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    return {f"{at}.{name}": rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def model_tensors(rng):
    """A whole Qwen2 model."""
    out = {
        "model.embed_tokens.weight": rng.normal(0, 1, (24, H)).astype(np.float32),
        "model.norm.weight": rng.normal(1, 0.1, H).astype(np.float32),
        "lm_head.weight": rng.normal(0, 1, (24, H)).astype(np.float32),
    }
    return out | layer_tensors(rng, "model.layers.0") | layer_tensors(rng, "model.layers.1")


def module_tensors(layout, rng, index=0):
    """One module in a published layout: (tensors, what its config.json says)."""

    def norm():
        return rng.normal(1, 0.1, H).astype(np.float32)

    fc = rng.normal(0, 0.4, (H, 2 * H)).astype(np.float32)
    norms = [norm() for _ in range(3)]
    if layout == "deepseek":
        at = f"model.layers.{2 + index}"
        names = ("enorm", "hnorm", "shared_head.norm")
        out = {f"{at}.{name}.weight": x for name, x in zip(names, norms, strict=True)}
        return out | {f"{at}.eh_proj.weight": fc} | layer_tensors(rng, at)
    if layout == "qwen":
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        out = {f"mtp.{name}.weight": x for name, x in zip(names, norms, strict=True)}
        return out | {"mtp.fc.weight": fc} | layer_tensors(rng, f"mtp.layers.{index}")
    before = "model." if layout == "mimo" else ""
    at = f"{before}mtp_layers.{index}"
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    out = {f"{at}.{name}.weight": x for name, x in zip(names, norms, strict=True)}
    if layout == "mimo":
        fc = np.concatenate([fc[:, H:], fc[:, :H]], axis=1)
    return out | {f"{at}.input_proj.weight": fc} | layer_tensors(rng, at)


def write(folder, tensors, config):
    """A folder with config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
