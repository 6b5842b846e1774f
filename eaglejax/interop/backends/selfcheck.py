"""Each operation of a backend against ordinary torch operators: the first thing to run on a device.

    python -m eaglejax.interop.backends.selfcheck --backend ascend [--device npu:0] [--dtype float16] [--json]

Needs no model and no jax. Inputs are small and random; a line says which operator, with which dtype and
shape, how far it is off and what is allowed. The exit status is 0 when every check passes, 1 when one fails
and 2 when the backend cannot run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence

from eaglejax.errors import EaglejaxError
from eaglejax.interop.backends.adapter import BACKENDS, DeviceAdapter, get_adapter
from eaglejax.interop.backends.arrays import torch_dtype
from eaglejax.interop.backends.limits import LimitError
from eaglejax.interop.backends.torch_cpu import TorchCPU
from eaglejax.interop.backends.torch_import import torch

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Largest error allowed, relative to the largest magnitude of the expected result."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: ``error`` relative to the largest expected magnitude, ``allowed``, and a ``note`` where
    there is more to say. ``outcome``: "pass", "fail", or "refused" for what the backend's limits exclude."""

    operator: str
    dtype: str
    shape: str
    outcome: str
    error: float | None = None
    allowed: float | None = None
    note: str = ""


def run_checks(adapter: DeviceAdapter, dtypes: Sequence[str] = tuple(TOLERANCE)) -> Iterator[Check]:
    """Every check of ``adapter``. Raises ConfigError where the backend cannot run."""
    adapter.require()
    for dtype in dtypes:
        for case in (_tree, _prompt, _merge, _dynamic_quant, _quant_matmul):
            yield from _guarded(case, adapter, dtype)


def _guarded(
    case: Callable[[DeviceAdapter, str], Iterator[Check]], adapter: DeviceAdapter, dtype: str
) -> Iterator[Check]:
    try:
        yield from case(adapter, dtype)
    except LimitError as error:
        yield Check(error.operator, dtype, "-", "refused", note=str(error))
    except RuntimeError as error:
        # What a device says of one operator is a finding, and the others are still to be checked.
        yield Check(case.__name__.strip("_"), dtype, "-", "fail", note=f"the device raised: {error}")


def _random(shape: Sequence[int], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch_dtype(dtype))


def _compare(
    operator: str, dtype: str, shape: str, got: torch.Tensor, want: torch.Tensor, note: str = ""
) -> Check:
    got, want = got.detach().cpu().float(), want.float()
    # Equal infinities (the log-sum-exp of nothing) are no difference.
    gap = torch.where(got == want, torch.zeros_like(want), (got - want).abs())
    largest = want[want.isfinite()].abs().max() if want.isfinite().any() else torch.tensor(1.0)
    error = float(gap.max() / largest.clamp_min(1e-30))
    allowed = TOLERANCE[dtype]
    outcome = "pass" if error <= allowed else "fail"
    return Check(operator, dtype, shape, outcome, error, allowed, note if outcome == "fail" else "")


def _case(batch: int, n: int, slots: int) -> tuple[list[int], torch.Tensor]:
    """Slots written of each row, and a keep mask: the prefix, and half of the new tokens before each one."""
    generator = torch.Generator().manual_seed(n)
    lengths = [slots - n - 3 * b for b in range(batch)]
    keep = torch.zeros(batch, n, slots, dtype=torch.bool)
    for row, start in enumerate(lengths):
        tree = (torch.rand(n, n, generator=generator) < 0.5).tril(-1) | torch.eye(n, dtype=torch.bool)
        keep[row, :, :start] = True
        keep[row, :, start : start + n] = tree
    return [start + n for start in lengths], keep


def _tree(adapter: DeviceAdapter, dtype: str) -> Iterator[Check]:
    """Attention of a tree's nodes: one node, some, and the most that the backend says it takes."""
    operator = adapter.attention_limits(torch_dtype(dtype)).operator
    b, hq, hkv, d, slots = 2, 4, 2, 64, 160
    k, v = (_random((b, hkv, slots, d), dtype, seed) for seed in (1, 2))
    for n in (1, 8, adapter.attention_limits(torch_dtype(dtype)).decode_queries or 24):
        q = _random((b, n, hq, d), dtype, n)
        written, keep = _case(b, n, slots)
        near_q, near_k, near_v, near_keep = (x.to(adapter.device) for x in (q, k, v, keep))
        out, lse = adapter.attention(
            near_q, near_k, near_v, near_keep, written, scale=d**-0.5, decode=True, lse=True
        )
        want, want_lse = TorchCPU().attention(q, k, v, keep, written, scale=d**-0.5, lse=True)
        turned, _ = TorchCPU().attention(q, k, v, ~keep, written, scale=d**-0.5)
        assert lse is not None
        assert want_lse is not None
        shape = f"{b} rows x {n} nodes, {hq} over {hkv} heads of {d}, {slots} slots"
        found = _compare(operator, dtype, shape, out, want)
        if found.outcome == "fail" and _compare(operator, dtype, shape, out, turned).outcome == "pass":
            note = "the mask's polarity is turned: the result is that of the opposite mask"
            found = dataclasses.replace(found, note=note)
        yield found
        yield _compare(f"{operator}: log-sum-exp", dtype, shape, lse, want_lse)


def _prompt(adapter: DeviceAdapter, dtype: str) -> Iterator[Check]:
    """Causal attention of rows end to end, one of them empty."""
    operator = adapter.ragged_limits(torch_dtype(dtype)).operator
    queries, keys, d = [5, 0, 9], [5, 0, 21], 64
    q = _random((sum(queries), 4, d), dtype, 1)
    k, v = (_random((sum(keys), 2, d), dtype, seed) for seed in (2, 3))
    near_q, near_k, near_v = (x.to(adapter.device) for x in (q, k, v))
    got = adapter.ragged_attention(near_q, near_k, near_v, queries, keys, scale=d**-0.5)
    want = TorchCPU().ragged_attention(q, k, v, queries, keys, scale=d**-0.5)
    yield _compare(operator, dtype, f"rows of {queries} queries and {keys} keys", got, want)


def _merge(adapter: DeviceAdapter, dtype: str) -> Iterator[Check]:
    """Three parts, of which one saw nothing for some queries."""
    outs = [_random((6, 4, 64), dtype, seed) for seed in range(3)]
    lses = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    lses[1][:2], outs[1][:2] = -torch.inf, 0
    near_outs, near_lses = ([x.to(adapter.device) for x in xs] for xs in (outs, lses))
    got, want = adapter.merge(near_outs, near_lses), TorchCPU().merge(outs, lses)
    operator = adapter.limits.merge.operator
    for name, x, y in zip((operator, f"{operator}: log-sum-exp"), got, want, strict=True):
        yield _compare(name, dtype, "3 parts of 6 x 4 x 64, one empty in part", x, y)


def _dynamic_quant(adapter: DeviceAdapter, dtype: str) -> Iterator[Check]:
    """Rows of different size, one of zeros; integers may differ by one where a quotient rounds otherwise."""
    x = _random((7, 128), dtype, 4) * torch.logspace(-2, 2, 7).unsqueeze(-1).to(torch_dtype(dtype))
    x[3] = 0
    values, scale = adapter.dynamic_quant(x.to(adapter.device))
    want, want_scale = TorchCPU().dynamic_quant(x)
    gap = int((values.cpu().int() - want.int()).abs().max())
    name, shape = adapter.limits.quant.operator, "7 x 128, a row of zeros"
    yield Check(f"{name}: integers", dtype, shape, "pass" if gap <= 1 else "fail", float(gap), 1.0)
    yield _compare(f"{name}: scales", dtype, shape, scale, want_scale)


def _quant_matmul(adapter: DeviceAdapter, dtype: str) -> Iterator[Check]:
    """int8 rows times an int8 matrix, with a scale a row and a column."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-127, 128, (9, 1536), dtype=torch.int8, generator=generator)
    w = torch.randint(-127, 128, (1536, 64), dtype=torch.int8, generator=generator)
    w_scale, x_scale = (torch.rand(n, generator=generator) / 1000 + 1e-3 for n in (64, 9))
    near_x, near_w, near_ws, near_xs = (t.to(adapter.device) for t in (x, w, w_scale, x_scale))
    got = adapter.quant_matmul(near_x, near_w, near_ws, near_xs, torch_dtype(dtype))
    want = TorchCPU().quant_matmul(x, w, w_scale, x_scale, torch_dtype(dtype))
    yield _compare(adapter.limits.quant.operator, dtype, "9 x 1536 x 64", got, want)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(description="Check a backend's operators against torch on the host.")
    parser.add_argument("--backend", required=True, choices=tuple(BACKENDS))
    parser.add_argument("--device", help="default: the backend's first")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), action="append", help="default: all of them")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    asked = parser.parse_args(arguments)
    try:
        adapter = get_adapter(asked.backend, asked.device)
        checks = list(run_checks(adapter, asked.dtype or tuple(TOLERANCE)))
    except EaglejaxError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.json:
        about = {"backend": asked.backend, "about": adapter.describe()}
        print(json.dumps({**about, "checks": [dataclasses.asdict(c) for c in checks]}, indent=1))
    else:
        for c in checks:
            size = "" if c.error is None else f"  {c.error:.2e} (allowed {c.allowed:.0e})"
            print(f"{c.outcome:8}{c.dtype:10}{c.operator}  {c.shape}{size}{'  ' + c.note if c.note else ''}")
    return int(any(c.outcome == "fail" for c in checks))


if __name__ == "__main__":
    sys.exit(main())
