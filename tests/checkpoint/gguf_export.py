"""Tiny GGUF files from tiny transformers models, written with the gguf package and its own table of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import hf_export
import jax
import numpy as np
import transformers as tf
from gguf import GGMLQuantizationType as Kind

# Block formats hold 32 values, so every row length is a multiple of that; ids cover the tokenizer below.
SIZES = hf_export.TINY | {"intermediate_size": 64, "vocab_size": 288}
LLAMA3 = hf_export.LLAMA3_ROPE

MODELS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "llama": (
        "llama",
        tf.LlamaConfig,
        tf.LlamaForCausalLM,
        {"rope_parameters": LLAMA3, "attention_bias": True},
    ),
    "mixtral": (
        "llama",
        tf.MixtralConfig,
        tf.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "qwen2": ("qwen2", tf.Qwen2Config, tf.Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen3": ("qwen3", tf.Qwen3Config, tf.Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3moe": (
        "qwen3moe",
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "gemma3": (
        "gemma3",
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}


def build(name: str) -> tuple[str, Any, Any, Any]:
    """(architecture, transformers model, our config, our f32 params)."""
    architecture, config_class, model_class, settings = MODELS[name]
    return architecture, *hf_export.from_config(config_class(**{**SIZES, **settings}), model_class)


def write(path: Path, name: str, kind: Kind = Kind.F32, *, edit: Any = None) -> tuple[Any, Any, Any]:
    """Write a model with its matrices as ``kind``; returns (transformers model, our config, our f32 params).

    ``edit(writer, tensors)`` may change the dict name -> (array, kind) or add metadata before writing.
    """
    architecture, model, config, params = build(name)
    writer = gguf.GGUFWriter(path, architecture)
    tensors = {k: (v, kind if v.ndim > 1 else Kind.F32) for k, v in _tensors(architecture, model).items()}
    hf = model.config
    _add_metadata(writer, architecture, hf)
    add_byte_level_tokenizer(writer, hf.vocab_size)
    if "rope_parameters" in MODELS[name][3] and architecture == "llama":
        tensors["rope_freqs.weight"] = (_llama3_divisors(hf), Kind.F32)
    if edit:
        edit(writer, tensors)
    for key, (array, as_kind) in tensors.items():
        writer.add_tensor(key, gguf.quantize(array, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, config, params


def _tensors(architecture: str, model: Any) -> dict[str, np.ndarray]:
    """A model's tensors under their GGUF names, in the layout that llama.cpp's converter gives them."""
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    out: dict[str, np.ndarray] = {}
    for key, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        stem = key.rpartition(".")[0]
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in key:
            layer = key.split(".")[2]
            if key.endswith("gate_up_proj"):
                gate, up = np.split(array, 2, axis=1)
                out[f"blk.{layer}.ffn_gate_exps.weight"], out[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
            else:
                out[f"blk.{layer}.ffn_down_exps.weight"] = array
            continue
        part = stem.rpartition(".")[2]
        if architecture == "llama" and part in heads:
            halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and part.endswith("norm"):
            array = array + np.float32(1)
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        out[found] = np.ascontiguousarray(array)
    return out


def _llama3_divisors(hf: Any) -> np.ndarray:
    """The tensor that stands for Llama 3's rope scaling: plain frequency over scaled frequency."""
    rope, dim = hf.rope_parameters, hf.head_dim
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
    keep = np.clip(
        (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1
    )
    return (1 / ((1 - keep) / rope["factor"] + keep)).astype(np.float32)


def _add_metadata(writer: gguf.GGUFWriter, architecture: str, hf: Any) -> None:
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(hf.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(hf.moe_intermediate_size)
    if architecture == "gemma3":
        writer.add_sliding_window(hf.sliding_window)


BYTES = list(tf.convert_slow_tokenizer.bytes_to_unicode().values())
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w", "\u0120w o", "1 2"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, rows: int, pre: str = "qwen2") -> None:
    """All bytes, a few merges, three control tokens, and padding up to the rows of the embedding."""
    tokens = [*BYTES, *(m.replace(" ", "") for m in MERGES), *SPECIALS]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 3) + [gguf.TokenType.CONTROL] * 3
    padding = [f"[PAD{i}]" for i in range(len(tokens), rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)


def assert_trees(got, want, check):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: check(np.asarray(a), np.asarray(b)), got, want)
