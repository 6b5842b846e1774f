"""What bandwidth and peak rate allow: tables of docs/performance.md, from formulas alone.

    python -m experiments.limits            print the tables as Markdown
    python -m experiments.limits --write docs/performance.md
                                            replace the blocks between its "limits" marks

Nothing here runs on a device. A time is the larger of bytes / bandwidth and operations / peak rate, of
published figures (``eaglejax.devices.chips``), so real times lie above it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from eaglejax.devices.chips import CHIPS, Chip
from eaglejax.models import memory
from eaglejax.models.config import ModelConfig
from eaglejax.nn.rope import RopeConfig

BF16, INT8, INT4 = 2.0, 1.0, 0.5
NODES = (1, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes moved, and operations that run at the bfloat16 or at the int8 rate."""

    bytes: float
    bf16: float = 0.0
    int8: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.bf16 + other.bf16, self.int8 + other.int8)

    def memory_us(self, chip: Chip, chips: int = 1) -> float:
        """Microseconds of reading and writing."""
        return 1e6 * self.bytes / (chip.bandwidth * chips)

    def compute_us(self, chip: Chip, chips: int = 1) -> float:
        """Microseconds of arithmetic; integers run as bfloat16 where the chip has no int8 products."""
        return 1e6 * (self.bf16 / chip.bf16 + self.int8 / (chip.int8 or chip.bf16)) / chips

    def us(self, chip: Chip, chips: int = 1) -> float:
        """Microseconds, the larger of the two: reading and arithmetic overlap."""
        return max(self.memory_us(chip, chips), self.compute_us(chip, chips))


def tree_attention(
    nodes: int,
    slots: int,
    *,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    kv: float = BF16,
) -> Work:
    """One layer's attention of ``nodes`` nodes over ``slots`` slots; int8 ones have a float32 scale each."""
    scale = 4 if kv == INT8 else 0
    cache = 2 * batch * kv_heads * slots * (dim * kv + scale)
    queries = 2 * batch * nodes * heads * dim * BF16
    return Work(cache + queries, bf16=4 * batch * heads * nodes * slots * dim)


def quant_matmul(
    rows: int, inputs: int, outputs: int, *, weight: float, activation: float, group: int | None = None
) -> Work:
    """``rows`` x ``inputs`` times a quantised matrix; float32 scales a channel, or a group and channel."""
    scales = 4 * outputs * (inputs // group if group else 1)
    moved = inputs * outputs * weight + scales + rows * inputs * activation + rows * outputs * BF16
    operations = 2.0 * rows * inputs * outputs
    return Work(moved, int8=operations) if activation == INT8 else Work(moved, bf16=operations)


def matmul(rows: int, inputs: int, outputs: int) -> Work:
    """The same product in bfloat16."""
    return quant_matmul(rows, inputs, outputs, weight=BF16, activation=BF16)


def hadamard(rows: int, size: int, factor: int) -> Work:
    """Rotation of rows: read, written, and multiplied by two dense factors of ``size``."""
    return Work(2 * rows * size * BF16, bf16=2 * rows * size * (factor + size // factor))


def ttt_attention(length: int, steps: int, *, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Work:
    """Forward of the last of ``steps`` training passes: causal over pass 0, one key of each later pass."""
    qkv = length * dim * BF16
    moved = qkv * (2 * heads + 2 * steps * kv_heads)
    return Work(moved, bf16=4 * heads * dim * (length * length / 2 + length * (steps - 1)))


def model(name: str) -> ModelConfig:
    """Llama-3.1-shaped targets of 8 and 70 billion weights."""
    sizes = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}
    hidden, wide, layers, heads = sizes[name]
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        rope=RopeConfig(),
        query_scale=128**-0.5,
    )


def forward(
    config: ModelConfig, nodes: int, slots: int, *, batch: int = 1, weight: float = BF16
) -> list[Work]:
    """A forward over ``nodes`` nodes a row: its products with weights, and its attention.

    The embedding is looked up, not multiplied, so its table is neither read whole nor counted.
    """
    counted = memory.parameter_count(config) - (
        0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    )
    products = Work(counted * weight, bf16=2.0 * counted * nodes * batch)
    layer = tree_attention(
        nodes,
        slots,
        batch=batch,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
    )
    layers = config.num_layers
    return [products, Work(layer.bytes * layers, layer.bf16 * layers)]


def chips_for(config: ModelConfig, chip: Chip) -> int:
    """Chips, a power of two, whose memory holds the bfloat16 weights with a fifth to spare."""
    need = memory.parameter_count(config) * BF16 * 1.2
    count = 1
    while count * chip.memory < need:
        count *= 2
    return count


def verify_ratio(config: ModelConfig, chip: Chip, nodes: int, slots: int, batch: int = 1) -> float:
    """Time of a verify of ``nodes`` nodes relative to one token; communication between chips left out."""

    def seconds(n: int) -> float:
        return sum(part.us(chip) for part in forward(config, n, slots, batch=batch))

    return seconds(nodes) / seconds(1)


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join([row(head), "|" + "---|" * len(head), *map(row, rows)])


def number(x: float) -> str:
    """Three significant digits, without an exponent where that stays readable."""
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def kernels() -> dict[str, Work]:
    """The calls that the table of kernels counts."""
    return {
        "tree_attention, 1 node, 8k bf16": tree_attention(1, 8192),
        "tree_attention, 64 nodes, 8k bf16": tree_attention(64, 8192),
        "tree_attention, 64 nodes, 8k int8": tree_attention(64, 8192, kv=INT8),
        "tree_attention, 64 nodes, 32k bf16": tree_attention(64, 32768),
        "bf16 product, 64 x 4096 x 14336": matmul(64, 4096, 14336),
        "quant_matmul W8A8, 64 x 4096 x 14336": quant_matmul(64, 4096, 14336, weight=INT8, activation=INT8),
        "quant_matmul W4A8, groups of 128": quant_matmul(
            64, 4096, 14336, weight=INT4, activation=INT8, group=128
        ),
        "quant_matmul W4A16, groups of 128": quant_matmul(
            64, 4096, 14336, weight=INT4, activation=BF16, group=128
        ),
        "hadamard, 64 x 14336": hadamard(64, 14336, 128),
        "ttt_attention forward, 8k, pass 3": ttt_attention(8192, 3),
    }


def tables() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of every table."""
    yield (
        "chips",
        table(
            ["chip", "memory, GB", "GB/s", "bf16 TFLOP/s", "int8 TOP/s", "ridge, operations a byte"],
            [
                [
                    c.name,
                    f"{c.memory / 1e9:.0f}",
                    f"{c.bandwidth / 1e9:.0f}",
                    f"{c.bf16 / 1e12:.0f}",
                    f"{c.int8 / 1e12:.0f}" if c.int8 else "as bf16",
                    f"{c.ridge:.0f}",
                ]
                for c in CHIPS.values()
            ],
        ),
    )
    yield (
        "kernels",
        table(
            ["call", "MB", "Gop", *CHIPS],
            [
                [
                    name,
                    number(work.bytes / 1e6),
                    number((work.bf16 + work.int8) / 1e9),
                    *(f"{number(work.memory_us(c))} / {number(work.compute_us(c))}" for c in CHIPS.values()),
                ]
                for name, work in kernels().items()
            ],
        ),
    )
    for name in ("8B", "70B"):
        config = model(name)
        for slots in (1024, 32768):
            yield (
                f"verify {name} {slots}",
                table(
                    ["chip", "chips", "one token, ms", *(f"N = {n}" for n in NODES[1:])],
                    [
                        [
                            c.name,
                            count := chips_for(config, c),
                            number(sum(part.us(c, count) for part in forward(config, 1, slots)) / 1e3),
                            *(f"{verify_ratio(config, c, n, slots):.2f}" for n in NODES[1:]),
                        ]
                        for c in CHIPS.values()
                    ],
                ),
            )


def replace_blocks(text: str) -> str:
    """``text`` with the block between ``<!-- limits: NAME -->`` and ``<!-- end -->`` of each table renewed.

    Raises ValueError for a table without a block, or a block without a table.
    """
    made = dict(tables())
    found = re.findall(r"<!-- limits: (.+?) -->", text)
    if sorted(found) != sorted(made):
        raise ValueError(f"the document has blocks {sorted(found)}; the tables are {sorted(made)}")

    def renew(match: re.Match[str]) -> str:
        return f"<!-- limits: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- limits: (.+?) -->\n.*?<!-- end -->", renew, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(description="Roofline tables of kernels, and of verifying draft trees.")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="renew the tables in this document")
    path = parser.parse_args(arguments).write
    if path is None:
        for name, text in tables():
            print(f"### {name}\n\n{text}\n")
        return
    text = replace_blocks(path.read_text(encoding="utf-8"))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


if __name__ == "__main__":
    main()
