"""A tiny target in a folder, tiny drafts, random batches."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from eaglejax.drafts.eagle_config import EagleConfig
from eaglejax.train.batch import Batch

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER = 264, 32, 4, 4, 8, 48


def byte_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    return backend


def tiny_folder(folder, *, template=TEMPLATE, seed=0):
    folder.mkdir(parents=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": template})
    )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 6,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 4,
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(HEADS // 2 * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(HEADS // 2 * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


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
