"""Tiny random transformers models, their weights in eaglejax's layout, and their outputs as numpy arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers as tf

from eaglejax.models import config as model_config
from eaglejax.models.families import from_hf

TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama2": (tf.LlamaConfig, tf.LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama3": (
        tf.LlamaConfig,
        tf.LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama_biased": (tf.LlamaConfig, tf.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM, {"sliding_window": 5}),
    "mixtral": (
        tf.MixtralConfig,
        tf.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": (
        tf.Qwen2Config,
        tf.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_moe": (
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "head_dim": 12,
        },
    ),
    "qwen3_moe_raw_weights": (
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "gemma3": (
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            },
        },
    ),
}


@functools.cache
def build(name: str) -> tuple[Any, model_config.ModelConfig, dict[str, Any]]:
    """(transformers model, our config, our f32 params) of a family; norms and biases are random too."""
    config_class, model_class, settings = FAMILIES[name]
    return from_config(config_class(**{**TINY, **settings}), model_class)


def from_config(hf_config: Any, model_class: Any) -> tuple[Any, model_config.ModelConfig, dict[str, Any]]:
    """As ``build`` for a transformers config object."""
    hf_config._attn_implementation = "eager"
    model = model_class(hf_config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight += 0.2 * noise
            else:
                weight.copy_(1.5 * noise * weight.shape[-1] ** -0.5)
    config = from_hf(hf_config.to_dict())
    return model, config, export(model, config)


def export(model: Any, config: model_config.ModelConfig) -> dict[str, Any]:
    """The weights of a transformers model as eaglejax's nested dict."""
    state = {k: v.detach().numpy() for k, v in model.state_dict().items()}

    def matrix(name: str) -> jnp.ndarray:
        return jnp.asarray(np.swapaxes(state[name], -1, -2))

    def layer(i: int) -> dict[str, Any]:
        at = f"model.layers.{i}."
        out: dict[str, Any] = {"attn_norm": jnp.asarray(state[at + "input_layernorm.weight"])}
        for ours in "qkvo":
            out[ours] = matrix(f"{at}self_attn.{ours}_proj.weight")
            if f"{at}self_attn.{ours}_proj.bias" in state:
                out[f"{ours}_bias"] = jnp.asarray(state[f"{at}self_attn.{ours}_proj.bias"])
        for ours in ("q_norm", "k_norm"):
            if f"{at}self_attn.{ours}.weight" in state:
                out[ours] = jnp.asarray(state[f"{at}self_attn.{ours}.weight"])
        after = jnp.asarray(state[at + "post_attention_layernorm.weight"])
        if config.sandwich_norms:
            out["post_attn_norm"] = after
            out["mlp_norm"] = jnp.asarray(state[at + "pre_feedforward_layernorm.weight"])
            out["post_mlp_norm"] = jnp.asarray(state[at + "post_feedforward_layernorm.weight"])
        else:
            out["mlp_norm"] = after
        if f"{at}mlp.gate.weight" in state:
            out["router"] = matrix(at + "mlp.gate.weight")
            gate, up = np.split(state[at + "mlp.experts.gate_up_proj"], 2, axis=1)
            out["experts"] = {
                "gate": jnp.asarray(gate.swapaxes(1, 2)),
                "up": jnp.asarray(up.swapaxes(1, 2)),
                "down": matrix(at + "mlp.experts.down_proj"),
            }
        else:
            for ours in ("gate", "up", "down"):
                out[ours] = matrix(f"{at}mlp.{ours}_proj.weight")
                if f"{at}mlp.{ours}_proj.bias" in state:
                    out[f"{ours}_bias"] = jnp.asarray(state[f"{at}mlp.{ours}_proj.bias"])
        return out

    params: dict[str, Any] = {
        "embed": jnp.asarray(state["model.embed_tokens.weight"]),
        "layers": [layer(i) for i in range(config.num_layers)],
        "norm": jnp.asarray(state["model.norm.weight"]),
    }
    if not config.tie_embeddings:
        params["head"] = matrix("lm_head.weight")
    return params


def run(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row of token ids [T] through transformers: (logits [T, V], boundaries [T, L+1, H])."""
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with torch.no_grad():
        out = model(torch.asarray(tokens[None]), output_hidden_states=True, use_cache=False)
    hook.remove()
    boundaries = torch.stack([*out.hidden_states[:-1], caught[0]], dim=2)
    return out.logits[0].numpy(), boundaries[0].numpy()
