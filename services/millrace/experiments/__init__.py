"""The papers' experiments, one module each, run by `millrace sim paper NAME`.

A module has `measure(quick, announce)`, which returns an `Outcome`. `quick` cuts the number of
requests for a first impression, and for tests. `measure` of a traced experiment also takes `trace`,
the path of a trace or of a folder of traces; without it, lengths are the shipped ones. `measure` of
an experiment that takes hours also takes `resume`, the file that keeps what is computed.
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
    ("flowprefill", "flowprefill"): "fig3 fig9 fig10 fig11 fig12 rounds fig14 fig15 fig16",
    ("medha", "medha"): "convoy policies chunking",
    ("mnemosyne", "mnemosyne"): "kvp spp batching tradeoff",
}
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        f"{paper}-{name}": f"{__name__}.{package}.{name}"
        for (paper, package), names in _NAMES.items()
        for name in names.split()
    }
)

#: The experiments that take another input, by its name: a trace of requests' lengths or times, a
#: file that keeps what is computed.
TAKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trace": ("medha-convoy", "medha-policies", "millrace-policies", "millrace-systems"),
        "resume": ("millrace-policies",),
    }
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: `measure` of its module, and its other inputs."""

    measure: Callable[..., Outcome]
    inputs: Mapping[str, Path]

    def run(
        self,
        console: Console,
        json_path: Path | None,
        plot_path: Path | None,
        quick: bool,
    ) -> None:
        """Runs the experiment, prints its figures beside the paper's, writes them where asked."""
        with console.status("") as status:
            outcome = self.measure(quick, status.update, **self.inputs)
        outcome.publish(console, json_path, plot_path)


def load_experiment(name: str, **inputs: Path | None) -> Experiment:
    """Returns the experiment of that name, with the inputs of `TAKERS` that are not None.

    Raises ConfigError for an unknown name, and for an input that the experiment doesn't take.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment {name!r}: there are {', '.join(EXPERIMENTS)}")
    given = {kind: path for kind, path in inputs.items() if path is not None}
    for kind in given:
        takers = TAKERS[kind]
        if name not in takers:
            do = "does" if len(takers) == 1 else "do"
            raise ConfigError(f"experiment {name!r} takes no --{kind}; {', '.join(takers)} {do}")
    module: Any = importlib.import_module(EXPERIMENTS[name])
    return Experiment(module.measure, given)
