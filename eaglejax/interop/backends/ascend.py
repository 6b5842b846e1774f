"""Huawei Ascend through ``torch_npu``.

Operators and their limits as the op-plugin documentation publishes them for Atlas A2 and A3
(``npu_fused_infer_attention_score``, ``npu_fusion_attention``, ``npu_attention_update``,
``npu_dynamic_quant``, ``npu_quant_matmul``). Nothing here has been run on a device yet.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import AttentionCall, Availability, DeviceAdapter, joint_lse
from eaglejax.interop.backends.arrays import dtype_name
from eaglejax.interop.backends.limits import AttentionLimits, LimitError, Limits, MergeLimits, QuantLimits
from eaglejax.interop.backends.torch_import import torch

MASKED = True
"""Value of an NPU mask at a slot that is NOT seen; torch's own convention and ours is the opposite. The
documentation of ``npu_fusion_attention`` says 1 = not computed; one example for the inference operator
passes a lower triangle of ones, which contradicts it, so this is the first thing to check on a device
(``python -m eaglejax.interop.backends.selfcheck --backend ascend``)."""

FULL_MASK = 0
"""sparse_mode with a mask of every query and slot. Modes 2 to 4 take a compressed causal or band mask, which
a tree is not."""

RIGHT_DOWN_CAUSAL = 3
"""sparse_mode of rows whose queries are the last of their keys; its mask is always ``CAUSAL_SIDE`` wide."""

CAUSAL_SIDE = 2048
"""Side of the compressed mask of sparse_mode 2 to 4."""

RAGGED = AttentionLimits(
    "npu_fusion_attention (TND)",
    ("float32", "bfloat16", "float16"),
    head_dim=(1, 768),
    heads=256,
    batch=1024,
    mask_shape=f"[{CAUSAL_SIDE}, {CAUSAL_SIDE}]",
    masked_is=MASKED,
    sparse_mode=RIGHT_DOWN_CAUSAL,
    empty_rows=False,
    softcap=False,
)
"""Rows laid end to end, their lengths as running sums."""

LIMITS = Limits(
    attention=(
        AttentionLimits(
            "npu_fused_infer_attention_score",
            ("bfloat16", "float16"),
            head_dim=(1, 512),
            head_dim_multiple=16,
            heads=256,
            group=64,
            batch=65536,
            decode_queries=16,
            block_multiple=128,
            block_max=512,
            mask_shape="[B, 1, N, S]",
            masked_is=MASKED,
            sparse_mode=FULL_MASK,
            empty_rows=False,
            softcap=False,
        ),
        AttentionLimits(
            "npu_fusion_attention",
            ("float32",),
            head_dim=(1, 768),
            heads=256,
            mask_shape="[B, 1, N, S]",
            masked_is=MASKED,
            sparse_mode=FULL_MASK,
            empty_rows=False,
            softcap=False,
        ),
    ),
    merge=MergeLimits(
        "npu_attention_update",
        ("float32", "bfloat16", "float16"),
        parts=16,
        head_dim=(8, 512),
        head_dim_multiple=8,
    ),
    quant=QuantLimits(
        "npu_dynamic_quant and npu_quant_matmul",
        ("bfloat16", "float16"),
        group_scales=False,
        largest=65535,
    ),
    source="op-plugin documentation, Atlas A2 and A3",
)


def npu_mask(keep: torch.Tensor) -> torch.Tensor:
    """The NPU's mask [B, 1, N, S] of a keep mask [B, N, S]; the one place where polarity turns."""
    return (keep != MASKED)[:, None].contiguous()


def sequence_lengths(lengths: Sequence[int], layout: str) -> list[int]:
    """``actual_seq_lengths`` of rows that hold ``lengths`` tokens: running sums for TND, where rows lie end
    to end, else each row's own."""
    return list(itertools.accumulate(lengths)) if layout == "TND" else list(lengths)


class Ascend(DeviceAdapter):
    """An Ascend NPU.

    ``block_size``: slots of a block of the paged cache that decoding reads, as a server does; None decodes
    over the contiguous cache, which has no bound on the queries of a request. float32 takes the training
    operator ``npu_fusion_attention``, because the inference operator has 16-bit floats alone, and so do
    prompt chunks, which it reads without padding.
    """

    name = "ascend"
    default_device = "npu:0"
    ragged_prompts = True
    limits = LIMITS

    def __init__(self, device: str | torch.device | None = None, *, block_size: int | None = 128) -> None:
        super().__init__(device)
        limits = LIMITS.attention[0]
        assert limits.block_multiple is not None
        assert limits.block_max is not None
        if block_size is not None and (
            block_size % limits.block_multiple or not 0 < block_size <= limits.block_max
        ):
            raise LimitError(
                self.name,
                limits.operator,
                "block_size",
                block_size,
                f"multiples of {limits.block_multiple} up to {limits.block_max}",
            )
        self.block_size = block_size

    @property
    def npu(self) -> Any:
        """The ``torch_npu`` module; raises ConfigError where it cannot be imported."""
        try:
            return importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"torch_npu cannot be imported ({error}); install the one for torch {torch.__version__} "
                "and source CANN's set_env.sh"
            ) from error

    def available(self) -> Availability:
        """Whether torch_npu is there and sees a device."""
        try:
            npu = self.npu
        except ConfigError as error:
            return Availability(False, str(error))
        if not npu.npu.is_available():
            return Availability(
                False, "torch_npu sees no device; check npu-smi and ASCEND_RT_VISIBLE_DEVICES"
            )
        return Availability(True, f"torch_npu {npu.__version__}, {npu.npu.device_count()} devices")

    @property
    def device(self) -> torch.device:
        """Importing torch_npu is what makes torch know ``npu``."""
        _ = self.npu
        return super().device

    def describe(self) -> dict[str, str]:
        """Versions, the device's name and the cache's blocks."""
        npu = self.npu
        return {
            **super().describe(),
            "torch_npu": npu.__version__,
            "name": npu.npu.get_device_name(self.device),
            "block_size": str(self.block_size),
        }

    def synchronize(self) -> None:
        """Wait for the NPU."""
        self.npu.npu.synchronize()

    def _attend(
        self, limits: AttentionLimits, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, keep = call.q, call.keep
        k, v = call.k.to(q.dtype).contiguous(), call.v.to(q.dtype).contiguous()
        queries = q.transpose(1, 2).contiguous()
        if limits.operator == "npu_fusion_attention":
            return self._fusion(queries, k, v, keep, call.scale)
        options: dict[str, Any] = {
            "num_heads": q.shape[2],
            "num_key_value_heads": k.shape[1],
            "input_layout": "BNSD",
            "scale": call.scale,
            "sparse_mode": FULL_MASK,
            "softmax_lse_flag": True,
        }
        if call.decode and self.block_size is not None:
            assert limits.decode_queries is not None
            if q.shape[1] > limits.decode_queries:
                raise LimitError(
                    self.name,
                    limits.operator,
                    "queries a request",
                    q.shape[1],
                    f"at most {limits.decode_queries} when decoding over a paged cache; draft fewer nodes, "
                    "or give block_size=None for a contiguous cache",
                )
            keep, options["block_table"] = self._pages(keep, k)
            options["block_size"] = self.block_size
            k, v = self._paged(k), self._paged(v)
        out, sums = self.npu.npu_fused_infer_attention_score(
            queries,
            k,
            v,
            atten_mask=npu_mask(keep),
            actual_seq_lengths=sequence_lengths([q.shape[1]] * q.shape[0], "BNSD"),
            actual_seq_lengths_kv=sequence_lengths(call.lengths, "BNSD"),
            **options,
        )
        return out.transpose(1, 2), sums[..., 0].transpose(1, 2)

    def _fusion(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The training operator; it returns the softmax's maximum and sum, each eight times over."""
        out, top, total, *_ = self.npu.npu_fusion_attention(
            q, k, v, q.shape[1], "BNSD", atten_mask=npu_mask(keep), scale=scale, sparse_mode=FULL_MASK
        )
        return out.transpose(1, 2), (top[..., 0] + torch.log(total[..., 0])).transpose(1, 2)

    def ragged_limits(self, dtype: torch.dtype) -> AttentionLimits:
        """Of the training operator, in the layout of rows end to end."""
        if dtype_name(dtype) not in RAGGED.dtypes:
            raise LimitError(self.name, RAGGED.operator, "dtype", dtype_name(dtype), ", ".join(RAGGED.dtypes))
        return RAGGED

    def _ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        scale: float,
    ) -> torch.Tensor:
        side = torch.ones(CAUSAL_SIDE, CAUSAL_SIDE, dtype=torch.bool, device=q.device).tril()
        out: torch.Tensor = self.npu.npu_fusion_attention(
            q.contiguous(),
            k.to(q.dtype).contiguous(),
            v.to(q.dtype).contiguous(),
            q.shape[1],
            "TND",
            atten_mask=npu_mask(side[None])[0, 0],
            scale=scale,
            actual_seq_qlen=sequence_lengths(queries, "TND"),
            actual_seq_kvlen=sequence_lengths(keys, "TND"),
            sparse_mode=RIGHT_DOWN_CAUSAL,
        )[0]
        return out

    def _blocks(self, slots: int) -> int:
        assert self.block_size is not None
        return -(-slots // self.block_size)

    def _pages(self, keep: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask widened to whole blocks, and the table [B, blocks a row] of a cache laid out by rows."""
        blocks = self._blocks(k.shape[2])
        assert self.block_size is not None
        keep = torch.nn.functional.pad(keep, (0, blocks * self.block_size - keep.shape[2]))
        table = torch.arange(k.shape[0] * blocks, dtype=torch.int32, device=k.device)
        return keep, table.reshape(k.shape[0], blocks)

    def _paged(self, cached: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, S, d] as blocks [B * blocks a row, Hkv, block_size, d]."""
        b, heads, slots, d = cached.shape
        blocks = self._blocks(slots)
        assert self.block_size is not None
        whole = torch.nn.functional.pad(cached, (0, 0, 0, blocks * self.block_size - slots))
        pages = whole.reshape(b, heads, blocks, self.block_size, d).permute(0, 2, 1, 3, 4)
        return pages.reshape(b * blocks, heads, self.block_size, d).contiguous()

    def _merge(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = outs[0].shape
        flat = [x.reshape(-1, shape[-1]).contiguous() for x in outs]
        # Parts that saw nothing: a finite, hopeless score keeps the operator's differences finite.
        sums = [x.float().clamp_min(-1e30).reshape(-1).contiguous() for x in lses]
        mixed, _ = self.npu.npu_attention_update(sums, flat, 0)
        return mixed.reshape(shape), joint_lse(lses)

    def _dynamic_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = self.npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1]))
        values, scale = values.reshape(x.shape), scale.reshape(x.shape[:-1])
        # What a row of zeros divided by its scale of zero becomes is not documented.
        empty = scale == 0
        return values.masked_fill(empty.unsqueeze(-1), 0), scale.masked_fill(empty, 1.0)

    def _quant_matmul(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        groups: torch.Tensor,
        x_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        product: torch.Tensor = self.npu.npu_quant_matmul(
            x.contiguous(), w, groups[0].contiguous(), pertoken_scale=x_scale.contiguous(), output_dtype=dtype
        )
        return product
