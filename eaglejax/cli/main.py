"""The console command. Options are the fields of one dataclass a command; ``docs/cli.md`` lists them all.

A command's module is imported when that command is run, so that help and refusals do not wait for jax.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from eaglejax.cli.interrupts import say_and_leave, watched

COMMANDS = {
    "demo": ("Demo", "watch a real model write the same text with and without drafts"),
    "generate": ("Generate", "answer prompts"),
    "serve": ("Serve", "serve a model to clients of OpenAI's API"),
    "bench": ("Bench", "measure speed and acceptance of methods beside plain decoding"),
    "inspect": ("Inspect", "say how a checkpoint is understood"),
    "convert": ("Convert", "write a draft in another project's form"),
    "quantize": ("Quantize", "quantise a model, rotated first if asked"),
    "align": ("Align", "write a draft for a rotated target"),
    "diagnose": ("Diagnose", "say why acceptance is low"),
    "regenerate": ("Regenerate", "let a target answer prompts, as training rows"),
    "features": ("Features", "write a target's features of a run's data to disk"),
    "train": ("Train", "train a draft"),
    "sweep": ("Sweep", "train a draft for every combination of some settings"),
    "parity": ("Parity", "compare with a torch run on another device"),
    "doctor": ("Doctor", "say what this machine is, and test the installation"),
}
"""Name of a command -> its class, in the module of that name, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 0: done, 1: done but not all is well, 2: refused.

    ``argv``: its words (None: the process's own, which ends with the command).
    """
    if argv is not None:
        return _main(argv, own_process=False)
    try:
        with watched():
            return _main(sys.argv[1:], own_process=True)
    except KeyboardInterrupt:
        say_and_leave()


def _main(argv: Sequence[str], *, own_process: bool) -> int:
    words = list(argv)
    name = words[0] if words else None
    if name in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    if name in ("-V", "--version"):
        import eaglejax

        print(f"eaglejax {eaglejax.__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        _refuse(name)
    from eaglejax.cli.run import run_command

    return run_command(lambda: _command(name), words[1:], own_process=own_process, prog=f"eaglejax {name}")


def _command(name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(f"eaglejax.cli.{name}"), COMMANDS[name][0])


def _help() -> str:
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: eaglejax COMMAND [OPTIONS]",
            "",
            "Lossless speculative decoding in JAX.",
            "",
            "commands:",
            *lines,
            "",
            "`eaglejax COMMAND --help` prints the options of a command, `eaglejax --version` the version.",
        ]
    )


def _refuse(name: str | None) -> NoReturn:
    if name is None:
        print(_help(), file=sys.stderr)
        raise SystemExit(2)
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
    print(f"error: {name!a} is no command; {hint}", file=sys.stderr)
    raise SystemExit(2)


def __getattr__(name: str) -> Any:
    if name != "Command":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import functools
    import operator
    from typing import Annotated

    import tyro

    kinds = [Annotated[_command(word), tyro.conf.subcommand(word)] for word in COMMANDS]
    return functools.reduce(operator.or_, kinds)


if __name__ == "__main__":
    sys.exit(main())
