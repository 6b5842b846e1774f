"""What the metadata of a GGUF file say of its model, in the terms of ``config.json``."""

from __future__ import annotations

from typing import Any

from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.tables import check_layers
from eaglejax.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
"""Values of ``general.architecture`` that are read."""

_UNREAD = (
    *("embedding_scale", "logit_scale", "residual_scale", "use_parallel_residual", "swin_norm"),
    *("expert_shared_count", "expert_weights_scale", "expert_group_count", "router_logit_softcapping"),
    *("interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers"),
    *("full_attention_interval", "nextn_predict_layers", "embedding_length_per_layer_input"),
)
"""Settings that would change the arithmetic in a way the decoder does not know; a value other than 0 is
refused."""

_READ = {
    "attention.": (
        *("head_count", "head_count_kv", "key_length", "value_length", "key_length_swa", "value_length_swa"),
        *("layer_norm_rms_epsilon", "layer_norm_epsilon", "sliding_window", "sliding_window_pattern"),
    ),
    "rope.": (
        *("dimension_count", "dimension_count_swa", "freq_base", "freq_base_swa", "scale_linear"),
        *("scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned"),
        *("scaling.attn_factor", "scaling.yarn_attn_factor"),
        *("scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
    ),
}
"""Settings of parts that change arithmetic, by prefix. Another one is refused, unless it is neutral."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # -1: as the type of scaling has it
    "expert_gating_func": (0, 1),  # not said, softmax
    "expert_weights_norm": (True,),
}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class _Metadata:
    """Typed look-ups under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        kind = file.metadata.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(
                f"{file.path} says that it is of the type {kind!r:.80}; only whole models are read: name the "
                "file of the language model itself"
            )
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        prefix = self.architecture + "."
        for name, value in file.metadata.items():
            if name.startswith(prefix) and not self._understood(name.removeprefix(prefix), value):
                raise CheckpointError(f"{file.path}: {name} = {value!r:.80} is not supported")

    def _understood(self, key: str, value: Any) -> bool:
        """Whether a setting is read, or changes nothing."""
        if key in _NEUTRAL:
            return value in _NEUTRAL[key]
        if key in _UNREAD or (key in _SOFTCAPS and self.architecture != "gemma3"):
            return not value
        part = next((part for part in _READ if key.startswith(part)), None)
        return part is None or key.removeprefix(part) in _READ[part] or not value

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            if not value or any(v != value[0] for v in value):
                raise CheckpointError(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers, which is not "
                    "supported"
                )
            value = value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no {self.architecture}.{key} in its metadata")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things, of which there is at least one."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} = {value!r:.80} must be a whole number above 0"
            )
        return value

    def number(self, key: str) -> float:
        """A number of 0 or more; 0 where the file does not say."""
        value = self.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} = {value!r:.80} must be a number of 0 or more"
            )
        return value


_MODEL_TYPES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}


def config_from_metadata(file: GGUFFile) -> dict[str, Any]:
    """What the file's ``config.json`` would say, as ``models.families.from_hf`` reads it.

    Raises ``CheckpointError`` for an architecture or setting that is not supported and for missing keys.
    """
    meta = _Metadata(file)
    if "token_embd.weight" not in file.names():
        raise CheckpointError(f"{file.path} lacks token_embd.weight: it holds no language model")
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    sizes = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
    for key in (*sizes, "rope.dimension_count", "rope.dimension_count_swa"):
        if meta.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {meta.architecture}.{key} = {meta.get(key)} differs from the head dimension "
                f"{head_dim}, "
                "which is not supported"
            )
    special = {k: file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos")}
    config: dict[str, Any] = {
        "model_type": _model_type(meta),
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.names(),
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
    }
    if config["model_type"] == "qwen3_moe":
        config |= {
            "num_experts": meta.count("expert_count"),
            "num_experts_per_tok": meta.count("expert_used_count"),
            "moe_intermediate_size": meta.count("expert_feed_forward_length"),
            # Files of sparse layers alone may leave the dense width out; no layer would use it.
            "intermediate_size": meta.get("feed_forward_length", meta.count("expert_feed_forward_length")),
            "norm_topk_prob": True,
        }
    else:
        config["intermediate_size"] = meta.count("feed_forward_length")
    if config["model_type"] == "mixtral":
        config |= {
            "num_local_experts": meta.count("expert_count"),
            "num_experts_per_tok": meta.count("expert_used_count"),
        }
    window = meta.number("attention.sliding_window")
    if meta.architecture.startswith("qwen") and 0 < window < config["max_position_embeddings"]:
        raise CheckpointError(
            f"{file.path}: {meta.architecture}.attention.sliding_window = {window} is not supported; files "
            "of this architecture do not say which layers slide"
        )
    if meta.architecture == "llama":
        biased = "blk.0.attn_q.bias" in file.names()
        config |= {"attention_bias": biased, "sliding_window": meta.get("attention.sliding_window") or None}
    if meta.architecture == "gemma3":
        config |= _gemma3(meta, head_dim, hidden, heads)
    return config


def _model_type(meta: _Metadata) -> str:
    """``llama`` files hold Llama, Mistral and Mixtral, told apart by what they use."""
    if meta.architecture != "llama":
        return _MODEL_TYPES[meta.architecture]
    if meta.number("expert_count"):
        return "mixtral"
    return "mistral" if meta.number("attention.sliding_window") else "llama"


def _gemma3(meta: _Metadata, head_dim: int, hidden: int, heads: int) -> dict[str, Any]:
    layers = meta.count("block_count")
    check_layers(meta.file.names(), layers, str(meta.file.path))
    flags = meta.get("attention.sliding_window_pattern")
    # One flag a layer, or the period at which a layer attends to everything.
    if not isinstance(flags, list):
        period = meta.count("attention.sliding_window_pattern", 6)
        flags = [bool((i + 1) % period) for i in range(layers)]
    return {
        # The 27B model alone (62 layers) scales by the mean width of a head; the metadata do not say so.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags],
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _rope_scaling(meta: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """Rotary scaling in the terms of ``config.json``, None for plain rotary embeddings."""
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    if kind == "none" and meta.get("rope.scale_linear"):
        kind = "linear"
    file = meta.file
    if "rope_freqs.weight" in file.names():
        if kind not in ("none", "longrope"):
            raise CheckpointError(
                f"{file.path} has both rope_freqs.weight and {kind!r} rope scaling; one must go"
            )
        # Llama 3's scaling is stored as its outcome: a divisor for every frequency, whatever the length.
        divisors = file.rows("rope_freqs.weight", 0, 1).reshape(-1).astype(float).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": meta.count("context_length"),
        }
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or not factor:
        raise CheckpointError(
            f"{file.path}: rope scaling type {kind!r} with factor {factor} is not supported; linear and "
            "yarn are"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        strength = meta.get("rope.scaling.attn_factor", meta.get("rope.scaling.yarn_attn_factor", 1.0))
        scaling |= {
            "original_max_position_embeddings": meta.need("rope.scaling.original_context_length"),
            "beta_fast": meta.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.get("rope.scaling.yarn_beta_slow", 1.0),
            "attn_factor": strength,
        }
    return scaling
