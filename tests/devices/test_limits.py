"""The roofline tables: formulas by hand, and a document that holds what the script prints."""

from pathlib import Path

import pytest

from eaglejax.devices.chips import CHIPS
from eaglejax.models import memory
from experiments import limits

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


def test_kernel_counts_by_hand():
    work = limits.tree_attention(64, 8192)
    assert work.bytes == 2 * 8 * 8192 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert work.bf16 == 2 * (2 * 64 * 32 * 8192 * 128)
    v5e = CHIPS["v5e"]
    assert work.memory_us(v5e) == pytest.approx(34_603_008 / 819e3)
    assert work.us(v5e) == work.compute_us(v5e) == pytest.approx(8.59e9 / 197e6, rel=1e-3)
    quant = limits.quant_matmul(64, 4096, 14336, weight=1, activation=1)
    assert quant.bytes == 4096 * 14336 + 4 * 14336 + 64 * 4096 + 64 * 14336 * 2
    # v4 multiplies integers as bfloat16.
    assert quant.compute_us(CHIPS["v4"]) == pytest.approx(2 * 64 * 4096 * 14336 / 275e6)
    assert quant.compute_us(v5e) == pytest.approx(2 * 64 * 4096 * 14336 / 394e6)


def test_a_verify_costs_one_step_until_the_ridge():
    config = limits.model("8B")
    assert memory.parameter_count(limits.model("70B")) == pytest.approx(70.6e9, rel=1e-3)
    for chip in CHIPS.values():
        ratios = [limits.verify_ratio(config, chip, n, 1024) for n in limits.NODES]
        assert ratios[0] == 1
        assert ratios == sorted(ratios)
        assert limits.verify_ratio(config, chip, 16, 1024) < 1.01
        assert limits.verify_ratio(config, chip, int(2 * chip.ridge), 1024) > 1.8
        assert limits.verify_ratio(config, chip, 16, 1024, batch=64) > 1.5
    assert limits.chips_for(config, CHIPS["v5e"]) == 2


def test_the_document_is_what_the_script_writes(tmp_path, capsys):
    text = DOCUMENT.read_text(encoding="utf-8")
    assert limits.replace_blocks(text) == text
    copy = tmp_path / "performance.md"
    copy.write_text(text.replace("TPU v5e |", "TPU none |"), encoding="utf-8")
    limits.main(["--write", str(copy)])
    assert copy.read_text(encoding="utf-8") == text
    limits.main([])
    assert capsys.readouterr().out.count("### ") == len(dict(limits.tables()))
    with pytest.raises(ValueError, match="blocks"):
        limits.replace_blocks("no marks")
