"""The console command. Options are the fields of one dataclass a command; ``docs/cli.md`` lists them all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from eaglejax.cli.align import Align
from eaglejax.cli.bench import Bench
from eaglejax.cli.convert import Convert
from eaglejax.cli.demo import Demo
from eaglejax.cli.diagnose import Diagnose
from eaglejax.cli.doctor import Doctor
from eaglejax.cli.features import Features
from eaglejax.cli.generate import Generate
from eaglejax.cli.inspect import Inspect
from eaglejax.cli.parity import Parity
from eaglejax.cli.quantize import Quantize
from eaglejax.cli.regenerate import Regenerate
from eaglejax.cli.run import run_command
from eaglejax.cli.sweep import Sweep
from eaglejax.cli.train import Train

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Quantize, tyro.conf.subcommand("quantize")]
    | Annotated[Align, tyro.conf.subcommand("align")]
    | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
    | Annotated[Regenerate, tyro.conf.subcommand("regenerate")]
    | Annotated[Features, tyro.conf.subcommand("features")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Parity, tyro.conf.subcommand("parity")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 0: done, 1: done but not all is well, 2: refused."""
    description = "Lossless speculative decoding in JAX."
    return run_command(Command, argv, prog="eaglejax", description=description)


if __name__ == "__main__":
    sys.exit(main())
