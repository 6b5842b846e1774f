"""Running a command from its words: parse, run, and say what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tyro

from eaglejax.cli.show import print_error
from eaglejax.errors import EaglejaxError


def run_command(kind: Any, argv: Sequence[str] | None, **about: Any) -> int:
    """Run one command; its exit status. 0: done, 1: done but not all is well, 2: refused.

    ``kind``: a dataclass with ``run``, or a union of them; its fields are the options. ``about``: what the
    help text says besides (``prog``, ``description``).
    """
    command = tyro.cli(kind, args=argv, config=(tyro.conf.FlagCreatePairsOff,), **about)
    try:
        return command.run()
    except EaglejaxError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
