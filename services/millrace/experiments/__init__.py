"""The papers' experiments, one module each, run by `millrace sim paper NAME`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from millrace.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


class Experiment(Protocol):
    """The interface of an experiment's module."""

    def run(
        self, console: Console, json_path: Path | None, plot_path: Path | None, quick: bool
    ) -> None:
        """Runs the experiment, prints its figures beside the paper's, writes them where asked.

        `quick` cuts the number of requests: for a first impression, and for tests.
        """


class TracedExperiment(Protocol):
    """An experiment whose requests' lengths may come from a trace file."""

    def run(
        self,
        console: Console,
        json_path: Path | None,
        plot_path: Path | None,
        quick: bool,
        trace: Path | None = None,
    ) -> None:
        """Runs as `Experiment.run`; without `trace` by the shipped lengths."""


#: Name on the command line -> module, imported only when it is run.
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "tetris-table1": "millrace.experiments.tetris.table1",
        "tetris-examples": "millrace.experiments.tetris.examples",
        "tetris-rates": "millrace.experiments.tetris.rates",
        "tetris-fig8": "millrace.experiments.tetris.fig8",
        "tetris-fig9": "millrace.experiments.tetris.fig9",
        "tetris-fig11": "millrace.experiments.tetris.fig11",
        "tetris-fig13": "millrace.experiments.tetris.fig13",
        "tetris-fig14": "millrace.experiments.tetris.fig14",
        "millrace-policies": "millrace.experiments.joined.policies",
        "millrace-systems": "millrace.experiments.joined.systems",
        "flowprefill-fig9": "millrace.experiments.flowprefill.fig9",
        "flowprefill-fig10": "millrace.experiments.flowprefill.fig10",
        "flowprefill-fig11": "millrace.experiments.flowprefill.fig11",
        "flowprefill-fig12": "millrace.experiments.flowprefill.fig12",
        "flowprefill-rounds": "millrace.experiments.flowprefill.rounds",
        "flowprefill-fig14": "millrace.experiments.flowprefill.fig14",
        "flowprefill-fig15": "millrace.experiments.flowprefill.fig15",
        "flowprefill-fig16": "millrace.experiments.flowprefill.fig16",
        "medha-convoy": "millrace.experiments.medha.convoy",
        "medha-policies": "millrace.experiments.medha.policies",
        "medha-chunking": "millrace.experiments.medha.chunking",
        "mnemosyne-kvp": "millrace.experiments.mnemosyne.kvp",
        "mnemosyne-spp": "millrace.experiments.mnemosyne.spp",
        "mnemosyne-batching": "millrace.experiments.mnemosyne.batching",
    }
)

#: The experiments that are a `TracedExperiment`.
TRACED = ("medha-convoy", "medha-policies", "millrace-policies", "millrace-systems")


def load_experiment(name: str) -> Experiment:
    """Returns the experiment of that name. Raises ConfigError for an unknown name."""
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS) or "none yet"
        raise ConfigError(f"experiment {name!r}: there are {known}")
    return cast(Experiment, importlib.import_module(EXPERIMENTS[name]))


def load_traced(name: str) -> TracedExperiment:
    """Returns the experiment of that name.

    Raises ConfigError for an experiment that takes no trace.
    """
    if name not in TRACED:
        raise ConfigError(f"experiment {name!r} takes no --trace; {', '.join(TRACED)} do")
    return cast(TracedExperiment, importlib.import_module(EXPERIMENTS[name]))
