"""Draw figures from results on record: ``python -m paper_figs [NAME ...]``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.errors import ConfigError, EaglejaxError
from experiments import record
from paper_figs import acceptance, data_scaling, draft_shape, n_alpha, quantization, rotation, style
from paper_figs.results import Results

FIGURES: dict[str, Callable[[Results], Any]] = {
    "acceptance": acceptance.draw,
    "n_alpha": n_alpha.draw,
    "data_scaling": data_scaling.draw,
    "draft_shape": draft_shape.draw,
    "rotation": rotation.draw,
    "quantization": quantization.draw_acceptance,
    "outliers": quantization.draw_outliers,
    "quantization_speed": quantization.draw_speed,
    "retrained": quantization.draw_retrained,
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draw figures from the results of experiments."""

    names: tyro.conf.Positional[tuple[str, ...]] = tuple(FIGURES)
    """Figures to draw; all by default."""
    results: Path = record.ROOT
    """The folder of the studies."""
    out: Path = Path(__file__).parent / "drawn"
    """Where figures go."""
    format: Literal["svg", "pdf", "png"] = "svg"
    """The kind of file."""

    def run(self) -> int:
        """The command. Exit status 1 where results are missing for a figure; the others are drawn."""
        for name in self.names:
            if name not in FIGURES:
                raise ConfigError(f"figure {name!r} is not known; there are {', '.join(FIGURES)}")
        results, missing = Results(self.results), False
        for name in self.names:
            try:
                figure = FIGURES[name](results)
            except EaglejaxError as error:
                show.print_error(f"{name}: {error}")
                missing = True
                continue
            show.print_note(str(style.save(figure, self.out / f"{name}.{self.format}")))
        return 1 if missing else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Draw, argv, prog="python -m paper_figs")


if __name__ == "__main__":
    sys.exit(main())
