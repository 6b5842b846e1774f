"""``torch_npu`` as its documentation describes it, on the host: refuses what is documented as refused, notes
every call and computes true results in f64 from the definition of attention."""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch

CAUSAL_SIDE = 2048


class ContractError(RuntimeError):
    """An argument that the operator's documentation excludes."""


def need(condition: bool, text: str) -> None:
    if not condition:
        raise ContractError(text)


def softmax_attention(q, k, v, masked, scale):
    """[H, n, d] over [Hkv, s, d]; ``masked`` [n, s] is 1 where nothing is computed: (out, max, sum) f64."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = (q.double() @ k.transpose(1, 2) * scale).masked_fill(masked, -torch.inf)
    top = scores.amax(-1)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    return weights @ v / total[..., None], top, total


class FakeNPU(types.ModuleType):
    """Put it into ``sys.modules['torch_npu']``; ``calls`` holds (operator, arguments)."""

    def __init__(self, available: bool = True) -> None:
        super().__init__("torch_npu")
        self.__version__ = "2.13.0.fake"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.npu = types.SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 8,
            get_device_name=lambda device: "Ascend910B (fake)",
            synchronize=lambda: None,
        )

    def npu_fused_infer_attention_score(
        self,
        query,
        key,
        value,
        *,
        atten_mask=None,
        actual_seq_lengths=None,
        actual_seq_lengths_kv=None,
        block_table=None,
        num_heads=1,
        num_key_value_heads=0,
        scale=1.0,
        input_layout="BSH",
        sparse_mode=0,
        block_size=0,
        softmax_lse_flag=False,
    ):
        self.calls.append(("npu_fused_infer_attention_score", dict(locals())))
        need(query.dtype in (torch.float16, torch.bfloat16), f"query dtype {query.dtype}")
        need(key.dtype == value.dtype == query.dtype, "key and value must have the query's dtype")
        need(input_layout == "BNSD", "this fake knows BNSD; TND takes no mask of a tree")
        need(all(x.is_contiguous() for x in (query, key, value)), "non-contiguous tensors")
        b, heads, n, d = query.shape
        need(heads == num_heads <= 256, f"num_heads {num_heads} for {heads} heads")
        need(num_heads % num_key_value_heads == 0, "heads are no multiple of key/value heads")
        need(num_heads // num_key_value_heads <= 64, "more than 64 query heads a key/value head")
        need(d <= 512 and d % 16 == 0, f"head_dim {d}")
        need(len(actual_seq_lengths) == b and len(actual_seq_lengths_kv) == b, "one length a row")
        need(max(actual_seq_lengths) <= n, "BNSD lengths are each row's own, at most S")
        if block_table is not None:
            need(block_size % 128 == 0 and 128 <= block_size <= 512, f"block_size {block_size}")
            need(n <= 16, f"{n} queries a request; decoding takes at most 16")
            need(block_table.dtype == torch.int32 and block_table.shape[0] == b, "block_table")
            need(key.shape[1:] == (num_key_value_heads, block_size, d), f"paged keys {tuple(key.shape)}")
            key, value = (self._unpage(x, block_table) for x in (key, value))
        slots = key.shape[2]
        need(max(actual_seq_lengths_kv) <= slots, "BNSD key lengths are each row's own, at most S")
        need(sparse_mode in (0, 1), f"sparse_mode {sparse_mode} takes no mask of a tree")
        need(atten_mask is not None and atten_mask.is_contiguous(), "a contiguous mask")
        need(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), f"mask dtype {atten_mask.dtype}")
        need(atten_mask.shape == (b, 1, n, slots), f"mask shape {tuple(atten_mask.shape)}")
        out = torch.empty_like(query)
        lse = torch.empty(b, heads, n, 1)
        for row, length in enumerate(actual_seq_lengths_kv):
            masked = atten_mask[row, 0, :, :length].bool()
            need(not masked.all(-1).any(), "a fully masked row loses accuracy without inner_precise 2")
            near = (x[row, :, :length] for x in (key, value))
            mixed, top, total = softmax_attention(query[row], *near, masked, scale)
            out[row], lse[row, ..., 0] = mixed.to(query.dtype), (top + total.log()).float()
        return out, lse if softmax_lse_flag else torch.zeros(1)

    @staticmethod
    def _unpage(blocks, table):
        rows = blocks[table.long()]  # [B, blocks a row, heads, block, d]
        return rows.permute(0, 2, 1, 3, 4).flatten(2, 3)

    def npu_fusion_attention(
        self,
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=None,
        padding_mask=None,
        atten_mask=None,
        scale=1.0,
        keep_prob=1.0,
        pre_tockens=2147483647,
        next_tockens=2147483647,
        inner_precise=0,
        prefix=None,
        actual_seq_qlen=None,
        actual_seq_kvlen=None,
        sparse_mode=0,
    ):
        self.calls.append(("npu_fusion_attention", dict(locals())))
        need(query.dtype in (torch.float32, torch.float16, torch.bfloat16), f"dtype {query.dtype}")
        need(query.dtype == key.dtype == value.dtype, "one dtype")
        need(1 <= query.shape[-1] <= 768, f"head_dim {query.shape[-1]}")
        need(atten_mask.dtype in (torch.bool, torch.uint8), f"mask dtype {atten_mask.dtype}")
        if input_layout == "TND":
            out = self._varlen(
                query, key, value, head_num, atten_mask, scale, actual_seq_qlen, actual_seq_kvlen, sparse_mode
            )
            return out, None, None, None, 0, 0, 0
        need(input_layout == "BNSD", f"layout {input_layout}")
        b, heads, n, _ = query.shape
        need(heads == head_num <= 256, f"head_num {head_num}")
        need(sparse_mode in (0, 1), "a tree's mask goes with sparse_mode 0 or 1")
        need(atten_mask.shape == (b, 1, n, key.shape[2]), f"mask shape {tuple(atten_mask.shape)}")
        need(not atten_mask.bool().all(-1).any(), "a fully masked row is not allowed")
        found = [
            softmax_attention(query[row], key[row], value[row], atten_mask[row, 0].bool(), scale)
            for row in range(b)
        ]
        out, top, total = (torch.stack(x) for x in zip(*found, strict=True))
        eight = [x.float()[..., None].repeat(1, 1, 1, 8) for x in (top, total)]
        return out.to(query.dtype), *eight, None, 0, 0, 0

    def _varlen(self, query, key, value, head_num, mask, scale, queries, keys, sparse_mode):
        need(query.shape[1] == head_num, f"head_num {head_num}")
        need(len(queries) == len(keys) <= 1024, "one running sum a row, at most 1024")
        for sums, rows in ((queries, query), (keys, key)):
            need(all(a <= b for a, b in itertools.pairwise(sums)), "TND lengths are running sums")
            need(sums[-1] == len(rows), f"running sums end at {sums[-1]}, not at T = {len(rows)}")
        need(sparse_mode == 3, "this fake knows rightDownCausal")
        need(mask.shape == (CAUSAL_SIDE, CAUSAL_SIDE), f"compressed mask {tuple(mask.shape)}")
        need(torch.equal(mask.bool(), torch.ones_like(mask).bool().triu(1)), "an upper triangle of ones")
        out = torch.empty_like(query)
        starts = zip([0, *queries], queries, [0, *keys], keys, strict=False)
        for q0, q1, k0, k1 in starts:
            if q1 > q0:
                masked = torch.ones(q1 - q0, k1 - k0).bool().triu(1 + (k1 - k0) - (q1 - q0))
                parts = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
                out[q0:q1] = softmax_attention(*parts, masked, scale)[0].transpose(0, 1).to(query.dtype)
        return out

    def npu_attention_update(self, lse, local_out, update_type):
        self.calls.append(("npu_attention_update", dict(locals())))
        need(1 <= len(lse) == len(local_out) <= 16, f"{len(lse)} parts; 1 to 16 are taken")
        need(update_type == 0, "update_type 1 is another operator")
        need(all(x.dtype == torch.float32 and x.ndim == 1 for x in lse), "log-sum-exps are f32 [rows]")
        need(all(x.ndim == 2 and x.is_contiguous() for x in local_out), "parts are contiguous [rows, d]")
        d = local_out[0].shape[1]
        need(8 <= d <= 512 and d % 8 == 0, f"head_dim {d}")
        sums = torch.stack(list(lse)).double()
        need(bool(sums.isfinite().all()), "exp of inf - inf is not a number")
        weights = torch.exp(sums - torch.logsumexp(sums, 0))
        mixed = sum(w[:, None] * x.double() for w, x in zip(weights, local_out, strict=True))
        return mixed.to(local_out[0].dtype), None

    def npu_dynamic_quant(self, x, *, smooth_scales=None, group_index=None, dst_type=None):
        self.calls.append(("npu_dynamic_quant", dict(locals())))
        need(x.dtype in (torch.float16, torch.bfloat16), f"dtype {x.dtype}")
        need(x.ndim > 1, "at least two dimensions")
        scale = x.float().abs().amax(-1) / 127
        return torch.round(x.float() / scale[:, None]).nan_to_num(-128).to(torch.int8), scale

    def npu_quant_matmul(
        self, x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None
    ):
        self.calls.append(("npu_quant_matmul", dict(locals())))
        need(x1.dtype == x2.dtype == torch.int8, "int8 matrices")
        need(max(x1.shape[-1], x2.shape[-1]) <= 65535, "last dimensions up to 65535")
        need(scale.dtype == torch.float32 and scale.shape == (x2.shape[1],), f"scale {tuple(scale.shape)}")
        need(pertoken_scale.dtype == torch.float32, "pertoken_scale is f32")
        need(pertoken_scale.shape == (x1.shape[0],), f"pertoken_scale {tuple(pertoken_scale.shape)}")
        need(output_dtype in (torch.bfloat16, torch.float16), f"output_dtype {output_dtype}")
        product = (x1.long() @ x2.long()).double() * scale.double() * pertoken_scale[:, None].double()
        return product.to(output_dtype)
