"""Adapters against fakes that hold them to the vendors' documented contracts, and their stated limits."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from fakes.musa import FakeMusa
from fakes.npu import FakeNPU

from eaglejax.errors import ConfigError
from eaglejax.interop.backends import ascend, selfcheck
from eaglejax.interop.backends.adapter import get_adapter, integer_product, reference_attention
from eaglejax.interop.backends.ascend import Ascend, npu_mask, sequence_lengths
from eaglejax.interop.backends.limits import LimitError
from eaglejax.interop.backends.musa import Musa
from eaglejax.interop.backends.torch_cpu import TorchCPU
from eaglejax.interop.portable import write_sources


@pytest.fixture
def npu(monkeypatch):
    fake = FakeNPU()
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    return fake


@pytest.fixture
def musa(monkeypatch):
    fake = FakeMusa()
    monkeypatch.setitem(sys.modules, "torch_musa", fake)
    monkeypatch.setattr(torch, "musa", fake.device, raising=False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fake.attention)
    return fake


def case(n=5, dtype=torch.float32, *, d=32, heads=4, slots=40, batch=2):
    """(q, k, v, keep, lengths): rows of different lengths, a tree behind each prefix."""
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(batch, n, heads, d, generator=generator).to(dtype)
    k, v = (torch.randn(batch, 2, slots, d, generator=generator).to(dtype) for _ in range(2))
    keep = torch.zeros(batch, n, slots, dtype=torch.bool)
    lengths = [slots - 7 * row for row in range(batch)]
    for row, end in enumerate(lengths):
        tree = (torch.rand(n, n, generator=generator) < 0.4).tril(-1) | torch.eye(n, dtype=torch.bool)
        keep[row, :, : end - n] = True
        keep[row, :, end - n : end] = tree
    return q, k, v, keep, lengths


def test_reference_attention_is_torchs_own_and_its_lse_is_the_logarithm_of_the_sum():
    q, k, v, keep, _ = case()
    out, lse = reference_attention(q, k, v, keep, scale=0.3)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=keep[:, None], scale=0.3
    )
    assert torch.allclose(out, want.transpose(1, 2), atol=1e-6)
    scores = (q.transpose(1, 2) @ keys.transpose(2, 3) * 0.3).masked_fill(~keep[:, None], -torch.inf)
    assert torch.allclose(lse, scores.logsumexp(-1).transpose(1, 2), atol=1e-5)


def test_a_query_that_sees_nothing_yields_zeros_and_no_mass():
    q, k, v, keep, _ = case()
    keep[1, 2] = False
    out, lse = reference_attention(q, k, v, keep, scale=1.0)
    assert torch.equal(out[1, 2], torch.zeros_like(out[1, 2]))
    assert bool((lse[1, 2] == -torch.inf).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", ["torch-cpu", "ascend", "musa"])
def test_every_operator_of_a_backend_passes_the_check_for_a_first_run_on_a_device(name, npu, musa):
    checks = list(selfcheck.run_checks(get_adapter(name, "cpu")))
    assert {c.outcome for c in checks} <= {"pass", "refused"}, [c for c in checks if c.outcome == "fail"]
    assert len([c for c in checks if c.outcome == "pass"]) >= (26 if name == "ascend" else 36)
    refused = {(c.operator, c.dtype) for c in checks if c.outcome == "refused"}
    products = ("npu_dynamic_quant and npu_quant_matmul", "float32")
    assert refused == ({products} if name == "ascend" else set())


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ascend_attention_is_true_with_and_without_a_paged_cache(npu, n, block, dtype):
    arguments = case(n, dtype, slots=150)
    out, lse = Ascend("cpu", block_size=block).attention(*arguments, scale=0.2, decode=True, lse=True)
    want, want_lse = TorchCPU().attention(*arguments, scale=0.2, lse=True)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert torch.allclose(out.float(), want.float(), atol=tolerance)
    assert torch.allclose(lse, want_lse, atol=tolerance)
    paged = npu.calls[0][1].get("block_table") is not None
    assert paged == (block is not None and dtype == torch.float16)


def test_mask_polarity_turns_in_one_place_and_nowhere_else(npu, monkeypatch):
    """An NPU mask is 1 where nothing is computed; torch's and ours are True where something is."""
    keep = torch.tensor([[[True, False], [True, True]]])
    assert npu_mask(keep).tolist() == [[[[False, True], [False, False]]]]
    arguments = case(4, torch.float16)
    right, _ = Ascend("cpu").attention(*arguments, scale=0.2)
    monkeypatch.setattr(ascend, "npu_mask", lambda keep: keep[:, None].contiguous())
    q, k, v, keep, lengths = arguments
    keep[:, :, 0] = False  # so that no row is empty under either reading
    wrong, _ = Ascend("cpu").attention(q, k, v, keep, lengths, scale=0.2)
    want, _ = TorchCPU().attention(*case(4, torch.float16), scale=0.2)
    assert torch.allclose(right.float(), want.float(), atol=4e-3)
    assert not torch.allclose(wrong.float(), want.float(), atol=0.1)


def test_a_turned_mask_is_named_by_the_device_check(npu, monkeypatch):
    monkeypatch.setattr(
        ascend, "npu_mask", lambda keep: keep[:, None].contiguous() if keep.ndim == 3 else keep
    )
    monkeypatch.setattr(Ascend, "_check_attention", lambda *arguments: None)
    monkeypatch.setattr(selfcheck, "_case", lambda b, n, slots: ([slots] * b, half(b, n, slots)))
    found = list(selfcheck._tree(Ascend("cpu"), "float16"))
    assert any("polarity is turned" in c.note for c in found)


def half(b, n, slots):
    keep = torch.zeros(b, n, slots, dtype=torch.bool)
    keep[:, :, ::2] = True
    return keep


def test_sequence_lengths_are_cumulative_in_tnd_and_each_rows_own_elsewhere(npu):
    assert sequence_lengths([3, 0, 5], "TND") == [3, 3, 8]
    assert sequence_lengths([3, 0, 5], "BNSD") == [3, 0, 5]
    adapter = Ascend("cpu")
    queries, keys = [3, 0, 5], [9, 0, 5]
    q = torch.randn(8, 4, 16)
    k, v = torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    got = adapter.ragged_attention(q, k, v, queries, keys, scale=0.5)
    assert torch.allclose(got, TorchCPU().ragged_attention(q, k, v, queries, keys, scale=0.5), atol=1e-5)
    _, arguments = npu.calls[-1]
    assert arguments["actual_seq_qlen"] == [3, 3, 8]
    assert arguments["actual_seq_kvlen"] == [9, 9, 14]
    adapter.attention(*case(3, torch.float16), scale=1.0)
    _, arguments = npu.calls[-1]
    assert arguments["actual_seq_lengths"] == [3, 3]
    assert arguments["actual_seq_lengths_kv"] == [40, 33]


def test_sixteen_queries_a_request_decode_and_seventeen_are_refused_by_name(npu):
    adapter = Ascend("cpu")
    adapter.attention(*case(16, torch.float16), scale=1.0, decode=True)
    with pytest.raises(LimitError, match=r"queries a request 17.*at most 16") as refusal:
        adapter.attention(*case(17, torch.float16), scale=1.0, decode=True)
    assert (refusal.value.limit, refusal.value.value) == ("queries a request", 17)
    # A prompt's chunk and a contiguous cache have no such bound.
    adapter.attention(*case(17, torch.float16), scale=1.0)
    Ascend("cpu", block_size=None).attention(*case(17, torch.float16), scale=1.0, decode=True)


@pytest.mark.parametrize(
    ("changes", "limit", "value"),
    [
        ({"d": 24}, "head_dim", 24),
        ({"d": 528}, "head_dim", 528),
        ({"heads": 258, "d": 16, "batch": 1}, "heads", 258),
        ({"heads": 130, "d": 16, "batch": 1}, "group", 65),
        ({"dtype": torch.int8}, "dtype", "int8"),
    ],
)
def test_ascend_refuses_shapes_and_dtypes_where_the_operator_does(npu, changes, limit, value):
    changes = {"dtype": torch.float16, **changes}
    arguments = case(2, torch.float16, **{k: v for k, v in changes.items() if k != "dtype"})
    q, *rest = arguments
    with pytest.raises(LimitError) as refusal:
        Ascend("cpu").attention(q.to(changes["dtype"]), *rest, scale=1.0)
    assert (refusal.value.limit, refusal.value.value) == (limit, value)
    assert not npu.calls


def test_limits_of_merging_and_of_integer_products(npu):
    adapter = Ascend("cpu")
    outs, lses = [torch.randn(3, 16)] * 17, [torch.zeros(3)] * 17
    with pytest.raises(LimitError, match="parts 17"):
        adapter.merge(outs, lses)
    with pytest.raises(LimitError, match="multiples of 8"):
        adapter.merge([torch.randn(3, 12)] * 2, [torch.zeros(3)] * 2)
    x, w = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(8, 3, dtype=torch.int8)
    with pytest.raises(LimitError, match="scale groups 2"):
        adapter.quant_matmul(x, w, torch.ones(2, 3), torch.ones(2), torch.float16)
    with pytest.raises(LimitError, match="dtype float32"):
        adapter.quant_matmul(x, w, torch.ones(3), torch.ones(2), torch.float32)
    with pytest.raises(LimitError, match="weight shape"):
        adapter.quant_matmul(
            torch.zeros(1, 65536, dtype=torch.int8),
            torch.zeros(65536, 1, dtype=torch.int8),
            torch.ones(1),
            torch.ones(1),
            torch.float16,
        )
    for block in (100, 640, 0):
        with pytest.raises(LimitError, match="block_size"):
            Ascend("cpu", block_size=block)


@pytest.mark.parametrize("name", ["ascend", "musa"])
def test_a_fully_masked_row_is_refused_by_row_and_query(name, npu, musa):
    q, k, v, keep, lengths = case(4, torch.float16)
    keep[1, 2] = False
    with pytest.raises(LimitError, match=r"fully masked row \(row 1, query 2\)"):
        get_adapter(name, "cpu").attention(q, k, v, keep, lengths, scale=1.0)


def test_a_cap_on_scores_is_refused_by_ascend_and_computed_by_musa(npu, musa):
    arguments = case(4)
    with pytest.raises(LimitError, match=r"softcap 30\.0"):
        Ascend("cpu").attention(*arguments, scale=1.0, softcap=30.0)
    got, _ = Musa("cpu").attention(*arguments, scale=1.0, softcap=2.0)
    want, _ = TorchCPU().attention(*arguments, scale=1.0, softcap=2.0)
    uncapped, _ = TorchCPU().attention(*arguments, scale=1.0)
    assert torch.allclose(got, want)
    assert not torch.allclose(got, uncapped, atol=1e-2)
    assert not musa.calls


def test_musa_hands_a_mask_of_every_head_and_never_is_causal(musa):
    q, k, v, keep, lengths = case(6)
    out, lse = Musa("cpu").attention(q, k, v, keep, lengths, scale=0.3)
    want, _ = TorchCPU().attention(q, k, v, keep, lengths, scale=0.3)
    assert torch.allclose(out, want, atol=1e-5)
    assert lse is None
    (call,) = musa.calls
    assert call["attn_mask"].shape == (2, 4, 6, 40)
    assert torch.equal(call["attn_mask"][:, 1], keep)
    assert call["is_causal"] is False
    with pytest.raises(ConfigError, match="float64"):
        Musa("cpu").attention(q.double(), k.double(), v.double(), keep, lengths, scale=0.3)


def test_integer_products_stay_exact_beyond_what_f32_counts():
    x = torch.full((2, 5000), 127, dtype=torch.int8)
    w = torch.full((5000, 3), 127, dtype=torch.int8)
    w[0] = 126
    assert integer_product(x, w).tolist() == [[127 * 127 * 5000 - 127] * 3] * 2


def test_backends_say_why_they_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", FakeNPU(available=False))
    assert "sees no device" in get_adapter("ascend", "cpu").available().reason
    fake = FakeMusa(available=False)
    monkeypatch.setitem(sys.modules, "torch_musa", fake)
    monkeypatch.setattr(torch, "musa", fake.device, raising=False)
    assert "sees no device" in get_adapter("musa", "cpu").available().reason
    for name in ("torch_npu", "torch_musa"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "cannot be imported" in get_adapter("ascend").available().reason
    with pytest.raises(ConfigError, match="torch_musa cannot be imported"):
        get_adapter("musa").require()
    if not torch.cuda.is_available():
        assert not get_adapter("torch-cuda").available().ok
    with pytest.raises(ConfigError, match=r"'tpu' is not known.*torch-cpu"):
        get_adapter("tpu")


def test_shapes_hold_on_the_meta_device():
    q, k, v, keep, lengths = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in case(7))
    adapter = TorchCPU("meta")
    out, lse = adapter.attention(q, k, v, keep, lengths, scale=1.0, lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 7, 4, 32), (2, 7, 4), "meta")
    merged, total = adapter.merge([out, out], [lse, lse])
    assert (merged.shape, total.shape) == (out.shape, lse.shape)
    values, scale = adapter.dynamic_quant(q)
    assert (values.dtype, values.shape, scale.shape) == (torch.int8, q.shape, q.shape[:-1])
    w = torch.empty(32, 9, dtype=torch.int8, device="meta")
    product = adapter.quant_matmul(values, w, torch.empty(4, 9, device="meta"), scale, torch.bfloat16)
    assert (product.shape, product.dtype) == ((2, 7, 4, 9), torch.bfloat16)


def test_a_private_device_is_known_by_its_name_and_never_taken_for_cuda(tmp_path):
    """Renaming the PrivateUse1 backend happens once a process, as importing torch_musa does it."""
    script = """
        import sys, types
        sys.modules["jax"] = None
        import torch
        from eaglejax.errors import ConfigError
        from eaglejax.interop.backends.adapter import get_adapter
        from eaglejax.interop.backends.arrays import torch_device

        for name in ("musa:0", "npu:0"):
            try:
                torch_device(name)
                raise SystemExit("a device that nobody registered was taken")
            except ConfigError as error:
                assert "import torch_" in str(error), error
        torch.utils.rename_privateuse1_backend("musa")
        sys.modules["torch_musa"] = types.ModuleType("torch_musa")
        torch.musa = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
        adapter = get_adapter("musa")
        assert adapter.device == torch.device("musa", 0)
        assert adapter.device.type == "musa"
        assert adapter.available().ok
        assert not get_adapter("torch-cuda").available().ok or torch.cuda.is_available()
    """
    write_sources(tmp_path)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120, cwd=tmp_path)


def test_the_command_says_what_passed_and_that_a_backend_is_missing(capsys, monkeypatch):
    assert selfcheck.main(["--backend", "torch-cpu", "--dtype", "float32", "--json"]) == 0
    assert '"outcome": "pass"' in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert selfcheck.main(["--backend", "ascend"]) == 2
    assert "torch_npu cannot be imported" in capsys.readouterr().err


def test_an_operator_that_raises_on_the_device_is_a_failed_check_and_the_others_run(npu, monkeypatch, capsys):
    def broken(*arguments, **options):
        raise RuntimeError("EZ9999: inner error")

    monkeypatch.setattr(npu, "npu_dynamic_quant", broken)
    assert selfcheck.main(["--backend", "ascend", "--device", "cpu", "--dtype", "float16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fail")] == [line for line in lines if "EZ9999" in line]
    assert any(line.startswith("pass") and "npu_quant_matmul" in line for line in lines)
