"""The papers' experiments, one module each, run by `millrace sim paper NAME`.

A module has `measure(quick, announce)`, which returns an `Outcome`. `quick` cuts the number of
requests for a first impression, and for tests. `measure` of a traced experiment also takes the path
of a trace; without it, lengths are the shipped ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from millrace.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from millrace.experiments.outcome import Outcome

#: Names on the command line by package; a module is imported only when it is run.
_NAMES = {
    ("tetris", "tetris"): "table1 examples rates fig8 fig9 fig11 fig13 fig14",
    ("millrace", "joined"): "policies systems",
    ("flowprefill", "flowprefill"): "fig9 fig10 fig11 fig12 rounds fig14 fig15 fig16",
    ("medha", "medha"): "convoy policies chunking",
    ("mnemosyne", "mnemosyne"): "kvp spp batching",
}
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        f"{paper}-{name}": f"{__name__}.{package}.{name}"
        for (paper, package), names in _NAMES.items()
        for name in names.split()
    }
)

#: The experiments whose requests' lengths may come from a trace.
TRACED = ("medha-convoy", "medha-policies", "millrace-policies", "millrace-systems")


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: `measure` of its module."""

    measure: Callable[..., Outcome]

    def run(
        self,
        console: Console,
        json_path: Path | None,
        plot_path: Path | None,
        quick: bool,
        *trace: Path,
    ) -> None:
        """Runs the experiment, prints its figures beside the paper's, writes them where asked."""
        with console.status("") as status:
            outcome = self.measure(quick, status.update, *trace)
        outcome.publish(console, json_path, plot_path)


def load_experiment(name: str) -> Experiment:
    """Returns the experiment of that name. Raises ConfigError for an unknown name."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment {name!r}: there are {', '.join(EXPERIMENTS)}")
    module: Any = importlib.import_module(EXPERIMENTS[name])
    return Experiment(module.measure)


def load_traced(name: str) -> Experiment:
    """Returns the experiment of that name.

    Raises ConfigError for an experiment that takes no trace.
    """
    if name not in TRACED:
        raise ConfigError(f"experiment {name!r} takes no --trace; {', '.join(TRACED)} do")
    return load_experiment(name)
