"""A tiny random model in a folder, with a tokenizer of bytes and a chat template."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
# A third of the vocabulary, once each: whatever the model writes, lookup soon finds a token of it here.
PRINTABLE = "".join(map(chr, range(33, 127)))
VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER = 264, 32, 1, 4, 8, 48


def byte_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    return backend


def write_model(folder, *, seed=0, layers=LAYERS, extra_tokens=(), template=TEMPLATE):
    folder.mkdir(parents=True)
    backend = byte_tokenizer()
    backend.add_tokens(list(extra_tokens))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": template})
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": VOCAB,
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": layers,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS // 2,
                "head_dim": HEAD_DIM,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e4,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
            }
        )
    )
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 6,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 4,
    }
    for i in range(layers):
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
