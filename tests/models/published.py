"""Tiny random models of the families, saved in their published layout by transformers and read from there."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers as tf
from hf_export import LLAMA3_ROPE, TINY, run

from eaglejax.checkpoint.hf import load_folder

LENGTH = 21
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0}
# Many heads, so that no two slots tie at a score of 0, where the choice is the sort's.
DSA = {"index_topk": 5, "index_head_dim": 12, "index_n_heads": 16}
HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 28}

TARGETS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma2": (
        tf.Gemma2Config,
        tf.Gemma2ForCausalLM,
        {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    ),
    "phi3": (tf.Phi3Config, tf.Phi3ForCausalLM, {"sliding_window": 7}),
    "smollm3": (
        tf.SmolLM3Config,
        tf.SmolLM3ForCausalLM,
        {"no_rope_layer_interval": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM, {"eos_token_id": 2}),
    "olmo3": (
        tf.Olmo3Config,
        tf.Olmo3ForCausalLM,
        {
            "eos_token_id": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        tf.GraniteConfig,
        tf.GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
        },
    ),
    "seed_oss": (tf.SeedOssConfig, tf.SeedOssForCausalLM, {"head_dim": 12, "attention_out_bias": True}),
    "ernie4_5": (tf.Ernie4_5Config, tf.Ernie4_5ForCausalLM, {"head_dim": 12, "use_bias": True}),
    "ernie4_5_moe": (
        tf.Ernie4_5_MoeConfig,
        tf.Ernie4_5_MoeForCausalLM,
        {
            "head_dim": 12,
            "moe_k": 2,
            "moe_num_experts": 5,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan_v1_dense": (
        tf.HunYuanDenseV1Config,
        tf.HunYuanDenseV1ForCausalLM,
        {"head_dim": 12, "rope_parameters": ALPHA},
    ),
    "hunyuan_v1_moe": (
        tf.HunYuanMoEV1Config,
        tf.HunYuanMoEV1ForCausalLM,
        {"head_dim": 12, "rope_parameters": ALPHA, "num_experts": 5, "moe_topk": 2},
    ),
    "glm4_moe_lite": (
        tf.Glm4MoeLiteConfig,
        tf.Glm4MoeLiteForCausalLM,
        {
            **MLA,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm4": (tf.Glm4Config, tf.Glm4ForCausalLM, {"head_dim": 12, "eos_token_id": 2}),
    "qwen2_moe": (
        tf.Qwen2MoeConfig,
        tf.Qwen2MoeForCausalLM,
        {**SHARED, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "glm4_moe": (
        tf.Glm4MoeConfig,
        tf.Glm4MoeForCausalLM,
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "minimax_m2": (
        tf.MiniMaxM2Config,
        tf.MiniMaxM2ForCausalLM,
        {
            "head_dim": 12,
            "rotary_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
        },
    ),
    "gpt_oss": (
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        {"head_dim": 12, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        tf.DeepseekV2Config,
        tf.DeepseekV2ForCausalLM,
        {**MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None},
    ),
    "deepseek_v3": (
        tf.DeepseekV3Config,
        tf.DeepseekV3ForCausalLM,
        {**MLA, "n_group": 4, "topk_group": 2, "rope_parameters": YARN, "attention_bias": True},
    ),
    "deepseek_v32": (
        tf.DeepseekV32Config,
        tf.DeepseekV32ForCausalLM,
        {**MLA, **DSA, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "llama4": (
        tf.Llama4TextConfig,
        tf.Llama4ForCausalLM,
        {
            "head_dim": 12,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 5,
            "floor_scale": 4,
            "attn_scale": 0.3,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "glm_moe_dsa": (tf.GlmMoeDsaConfig, tf.GlmMoeDsaForCausalLM, {**MLA, **DSA}),
    "qwen3_next": (tf.Qwen3NextConfig, tf.Qwen3NextForCausalLM, {**HYBRID, **SHARED}),
    "qwen3_5": (tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM, HYBRID),
    "qwen3_5_moe": (tf.Qwen3_5MoeTextConfig, tf.Qwen3_5MoeForCausalLM, {**HYBRID, **SHARED}),
}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """The random transformers model of a family, f32, saved in ``folder``; ``changes``: of its config."""
    config_class, model_class, settings = TARGETS[name]
    hf_config = config_class(**{**TINY, **settings, **changes})
    hf_config._attn_implementation = "eager"
    model = model_class(hf_config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight += 0.2 * noise
            else:
                weight.copy_(1.5 * noise * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@functools.cache
def case(name: str) -> tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray]:
    """(config, params, tokens [T], transformers' logits [T, V] and boundaries [T, L+1, H])."""
    tokens = np.random.default_rng(3).integers(3, TINY["vocab_size"], LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        model = saved(name, Path(folder))
        config, params = load_folder(Path(folder), jnp.float32)
    return config, params, tokens.astype(np.int32), *run(model, tokens)
