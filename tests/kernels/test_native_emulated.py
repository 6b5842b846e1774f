"""Kernels of processors that are not here: compiled by a cross compiler and run under an emulator."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from kernels_pallas import dense_matmul, native, quant_matmul

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
DRIVER = Path(__file__).parent / "native" / "products_driver.cc"


@pytest.mark.skipif(
    bool(MISSING), reason=f"Arm levels are not tested here: there is no {' and no '.join(MISSING)}"
)
@pytest.mark.parametrize(
    ("kernel", "level"),
    [
        (quant_matmul.cpu.KERNEL, "dotprod"),
        (dense_matmul.cpu.KERNEL, "neon"),
        pytest.param(quant_matmul.cpu.KERNEL, "neon", marks=pytest.mark.slow),
        pytest.param(dense_matmul.cpu.KERNEL, "dotprod", marks=pytest.mark.slow),
    ],
)
def test_products_on_arm_are_those_of_plain_loops_and_rows_are_independent(kernel, level, tmp_path):
    program = tmp_path / "driver"
    include = ["-I", str(native.INCLUDE), "-isystem", jax.ffi.include_dir()]
    defines = [
        f'-DKERNEL_SOURCE="{kernel.source}"',
        *(["-DKERNEL_QUANT"] if kernel.op == "quant_matmul" else []),
    ]
    flags = [flag for flag in native.compile_flags(level) if flag not in ("-shared", "-fPIC")]
    subprocess.run(
        [COMPILER, *flags, "-static", *include, *defines, str(DRIVER), "-o", str(program)], check=True
    )
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stdout + done.stderr
