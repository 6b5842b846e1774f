"""``torch_musa`` as its documentation describes it, on the host: the module that registers the device, and
the attention operator with what it asks of its arguments."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F

ORIGINAL = F.scaled_dot_product_attention


class ContractError(RuntimeError):
    """An argument that the operator's documentation excludes."""


def need(condition: bool, text: str) -> None:
    if not condition:
        raise ContractError(text)


class FakeMusa(types.ModuleType):
    """Put it into ``sys.modules['torch_musa']`` and ``device`` into ``torch.musa``."""

    def __init__(self, available: bool = True) -> None:
        super().__init__("torch_musa")
        self.calls: list[dict] = []
        self.device = types.SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 2,
            get_device_name=lambda device: "MTT S4000 (fake)",
            synchronize=lambda: None,
        )

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        """``torch.nn.functional.scaled_dot_product_attention`` on a MUSA device."""
        self.calls.append(dict(locals()))
        need(query.ndim == key.ndim == value.ndim and query.ndim in (3, 4), "3 or 4 dimensions")
        need(query.dtype == key.dtype == value.dtype, "one dtype")
        need(query.dtype != torch.float64, "no double precision")
        need(attn_mask is None or not is_causal, "attn_mask and is_causal exclude each other")
        n, s = query.shape[-2], key.shape[-2]
        shapes = [(n, s), (query.shape[0], s), (query.shape[1], n, s), (*query.shape[:2], n, s)]
        need(tuple(attn_mask.shape) in shapes, f"mask shape {tuple(attn_mask.shape)}")
        need(query.shape[1] == key.shape[1], "as many key/value heads as query heads")
        return ORIGINAL(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
