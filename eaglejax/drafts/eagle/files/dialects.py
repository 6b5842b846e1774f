"""The config.json of an EAGLE draft in each form that other projects load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.settings import KEY, write_settings
from eaglejax.drafts.rope_settings import rope_to_hf


def write_config(
    form: str,
    config: EagleConfig,
    architecture: str,
    dtype: str,
    source: Mapping[str, Any],
    verifier: str | None,
) -> dict[str, Any]:
    """The document for ``form``.

    ``architecture``: the class name that its readers look for; ``dtype``: of the tensors; ``source``: a
    config.json whose token ids are kept; ``verifier``: name of the target, for forms that record it.
    """
    out = _CONFIGS[form](config, architecture, dtype, source, verifier)
    if KEY not in out:
        # Other loaders pass over the key. A second alignment has to be refused, and an embedding that is lost
        # would be taken from the target, whose is another.
        block: dict[str, Any] = {} if config.basis is None else {"basis": config.basis}
        if config.version == 3 and config.own_embedding:
            block["own_embedding"] = True
        if block:
            out[KEY] = block
    return out


_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "hidden_act")
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def _layer_config(config: EagleConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a Llama layer, which every form has somewhere."""
    flat = {**source, **(source.get("transformer_layer_config") or {})}
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATION_NAMES[config.activation],
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.rope.max_position,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **rope_to_hf(config.rope),
        **{k: flat[k] for k in _KEPT if flat.get(k) is not None and k != "hidden_act"},
    }


def _flat_config(
    config: EagleConfig, architecture: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    del verifier
    out = {"architectures": [architecture], **_layer_config(config, dtype, source)}
    if config.version == 1:
        return out | {"bias": config.fc_bias, "qkv_bias": config.qkv_bias}
    out["draft_vocab_size"] = config.draft_vocab_size
    if config.target_hidden_size != config.hidden_size:
        out["target_hidden_size"] = config.target_hidden_size
    return out


def _sglang_config(
    config: EagleConfig, architecture: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    out = _flat_config(config, architecture, dtype, source, verifier)
    if config.version == 1:
        return out
    out |= {"bias": config.fc_bias, "fc_norm": config.aux_norm == "each", "norm_output": config.feed_normed}
    return out | _block_ids(config)


def _block_ids(config: EagleConfig, **more: Any) -> dict[str, Any]:
    """``eagle_config`` with layer ids that count blocks: boundary i is the output of block i - 1."""
    inner: dict[str, Any] = {"use_aux_hidden_state": not config.reads_final, **more}
    if config.aux:
        ids = [i - 1 for i in config.aux]
        if ids[0] != 1:
            # Loaders take a list for block numbers only when it starts at 1; any other is read as boundaries.
            # Boundaries that start at 1 can therefore not be written at all, see ``eagle_write.FORMS``.
            ids = list(config.aux)
        inner["eagle_aux_hidden_state_layer_ids"] = ids
    return {"eagle_config": inner}


def _modelopt_config(
    config: EagleConfig, architecture: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    out = _flat_config(config, architecture, dtype, source, verifier)
    out |= {"attention_bias": False, "mlp_bias": False, "use_cache": True}
    # Both names are in use for feeding the normalised state back.
    fed = {"return_hidden_post_norm": True} if config.feed_normed else {}
    out |= {"norm_output": True} if config.feed_normed else {}
    return out | _block_ids(
        config,
        use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True,
        use_mtp_layernorm=False,
        next_layer_regular=True,
        **fed,
    )


def _speculators_config(
    config: EagleConfig, architecture: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    layer = _layer_config(config, dtype, source)
    layer |= {"attention_bias": config.o_bias, "mlp_bias": False}
    if config.qk_norm:
        layer["model_type"] = "qwen3"
    if any(config.windows):
        layer["sliding_window"] = next(w for w in config.windows if w)
        layer["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
    given = (source.get("speculators_config") or {}).get("verifier") or {}
    kind = "peagle" if config.parallel else "eagle3"
    mask = {"mask_token_id": config.mask_id} if config.parallel else {}
    return {
        "architectures": ["PEagleSpeculator" if config.parallel else architecture],
        "speculators_model_type": kind,
        **mask,
        "speculators_version": (source.get("speculators_version") or "0.4.0"),
        "torch_dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.aux_norm == "joined",
        "fc_norm": config.aux_norm == "each",
        "norm_output": config.feed_normed,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(config.aux) or None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _drafted(source) if config.parallel else 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": verifier or given.get("name_or_path"),
                "architectures": given.get("architectures") or [],
            },
        },
    }


def _drafted(source: Mapping[str, Any]) -> int:
    """Tokens that a draft in parallel was trained to guess, where the file that it comes from says so."""
    block = source.get("speculators_config")
    methods = block.get("proposal_methods") if isinstance(block, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if isinstance(count, int) and count > 0 else 3


def _eaglejax_config(
    config: EagleConfig, architecture: str, dtype: str, source: Mapping[str, Any], verifier: str | None
) -> dict[str, Any]:
    return _flat_config(config, architecture, dtype, source, verifier) | {KEY: write_settings(config)}


_CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "safeailab": _flat_config,
    "sglang": _sglang_config,
    "speculators": _speculators_config,
    "modelopt": _modelopt_config,
    "eaglejax": _eaglejax_config,
}
