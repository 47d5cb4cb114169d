"""Runs the measurements of `millrace bench hol` in order and makes the document."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.models import LLAMA_27M
from millrace.bench.common.options import Announce
from millrace.bench.common.random_model import write_random_model
from millrace.bench.hol import pool as hol_pool
from millrace.bench.hol import simulated as hol_sim
from millrace.bench.hol.command import Settings
from millrace.bench.hol.live import Interrupted, LiveSystem, Served
from millrace.bench.hol.search import CARRIED, CARRIED_BY_CLASS, Goal, Goodput, found, goodput
from millrace.bench.hol.systems import FCFS, NAMES, OURS, WHOLE_TOKENS, System, systems
from millrace.bench.hol.traffic import (
    CLASS_GOAL,
    FILE_P99_TOKENS,
    Attainment,
    Traffic,
    capacity_rps,
    mean_tokens,
    multiples,
    objectives,
)
from millrace.container_limits import usable_cores
from millrace.core.config import EngineConfig
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.engine.assembly import Engine, open_engine
from millrace.profiler.fitting import build_profile, measured_alone

_LONG_MULTIPLE = 12.8  # objective of the long prompt over its isolated TTFT: a file's
_SIM_TOLERANCE, _SIM_STEP, _SIM_RUNS = 0.03, 2.0, 40
_START = (0.2, 1.6)  # a search begins within these shares of the capacity, independent of `sim`


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Measures and returns the document. Raises MillraceError for prompts that don't fit."""
    begun_s = time.perf_counter()
    threads = settings.threads or max(1, usable_cores() // 2)
    blocking_tokens = round(FILE_P99_TOKENS / settings.scale)
    document: dict[str, Any] = {
        "benchmark": "hol",
        "settings": {**asdict(settings), "threads": threads, "blocking_tokens": blocking_tokens},
        "machine": describe_machine(),
    }
    with tempfile.TemporaryDirectory() as folder:
        model, token_ids = _model(settings.model, Path(folder))
        compared = systems(settings.systems, settings.scale)
        engine = open_engine(
            model,
            EngineConfig(
                dtype=settings.dtype,
                threads=threads,
                kv_bytes=settings.kv_bytes,
                max_chunk_tokens=WHOLE_TOKENS,
            ),
        )
        most_tokens = engine.pool_context_tokens - 1  # one to generate
        for option, tokens in (
            ("--long-tokens", settings.long_tokens),
            (f"--scale {settings.scale:g}: a long file", blocking_tokens),
        ):
            if tokens > most_tokens:
                raise ConfigError(
                    f"{option} is {tokens} tokens; the model and {settings.kv_bytes} bytes of KV "
                    f"hold prompts of at most {most_tokens}"
                )
        announce("measuring a profile")
        profile = build_profile(
            *measured_alone(
                engine, settings.profile_s, threads=threads, max_chunk_tokens=WHOLE_TOKENS
            )
        )
        profile_path = Path(folder) / "profile.json"
        profile_path.write_text(json.dumps(profile.to_json()))
        document |= _in_process(engine, settings, blocking_tokens, announce)
        del engine
        served = Served(
            model=str(model),
            profile=profile_path,
            dtype=settings.dtype,
            threads=threads,
            kv_bytes=settings.kv_bytes,
            token_ids=token_ids,
        )
        document |= await _Comparison(settings, served, profile, most_tokens, announce).run(
            compared
        )
    document["profile"] = profile.to_json()
    document["took_s"] = time.perf_counter() - begun_s
    return document


def _model(model: str, folder: Path) -> tuple[Path | str, tuple[int, int] | None]:
    """Returns the model and the ids that prompts are drawn from; None to ask the server."""
    if model:
        return model, None
    return write_random_model(folder, LLAMA_27M), (0, LLAMA_27M["vocab_size"] - 1)


def _in_process(
    engine: Engine, settings: Settings, blocking_tokens: int, announce: Announce
) -> dict[str, Any]:
    """Runs the parts over the execution pool alone: chunks as in the systems that stop after
    them.
    """
    cases = [("operator", WHOLE_TOKENS), ("layer", WHOLE_TOKENS)]
    of_chunks = systems(NAMES, settings.scale)
    cases += [("chunk", one.chunk_tokens) for one in of_chunks if one.preemption == "chunk"]
    blocking = []
    for granularity, chunk_tokens in cases:
        announce(f"blocking time: stops after a{'n' * (granularity[0] == 'o')} {granularity}")
        blocking.append(
            hol_pool.blocking(
                engine,
                tokens=blocking_tokens,
                chunk_tokens=chunk_tokens,
                granularity=granularity,
                budget_s=settings.blocking_s,
                seed=settings.seeds[0],
            )
        )
    announce("cost of checks")
    tokens = mean_tokens(settings.scale)["file"]
    checks = hol_pool.checks(engine, tokens=tokens, rounds=settings.check_rounds)
    return {"blocking": [asdict(one) for one in blocking], "checks": asdict(checks)}


class _Comparison:
    """Compares the systems, live and simulated."""

    def __init__(
        self,
        settings: Settings,
        served: Served,
        profile: Profile,
        most_tokens: int,
        announce: Announce,
    ) -> None:
        self._settings = settings
        self._served = served
        self._profile = profile
        self._prefill = profile.prefill.limited(1)  # of the one instance
        self._most_tokens = most_tokens
        self._announce = announce
        self._tokens = mean_tokens(settings.scale)
        self._isolated_s: dict[str, float] = {}
        self._traffic: Traffic | None = None

    async def run(self, compared: Sequence[System]) -> dict[str, Any]:
        """Returns the document's parts "classes", "goodput" and "interrupted"."""
        live: dict[str, list[Goodput]] = {}
        simulated: dict[str, list[Goodput]] = {}
        by_class: dict[str, list[Goodput]] = {}
        drift: dict[str, float] = {}
        interrupted: dict[str, Interrupted] = {}
        for system in compared:
            async with LiveSystem(system, self._served, self._announce) as stack:
                text_s = await self._isolate(stack)
                drift[system.name] = text_s / self._isolated_s["text"]
                simulated[system.name] = [await self._simulated(system, s) for s in self._seeds]
                by_class[system.name] = [
                    await self._simulated(system, seed, CARRIED_BY_CLASS) for seed in self._seeds
                ]
                live[system.name] = [
                    await self._live(stack, seed, expected)
                    for seed, expected in zip(self._seeds, simulated[system.name], strict=True)
                ]
                if system.name in (FCFS, OURS):
                    interrupted[system.name] = await self._interrupted(stack)
        return {
            "beyond_prefill_s": self._beyond_prefill_s,
            "classes": self._classes(),
            "file_over_text": self._prefill.isolated_s(self._tokens["file"])
            / self._prefill.isolated_s(self._tokens["text"]),
            "bounds_rps": self._bounds_rps(),
            "goodput": {
                system.name: self._found(system, live, simulated, drift[system.name])
                | {
                    "simulated_every_class_rps": _median(by_class[system.name]),
                    "simulated_every_class_ratio": _ratio(by_class, system.name),
                }
                for system in compared
            },
            "interrupted": {
                name: {
                    "isolated_ms": 1e3 * one.isolated_s,
                    "ttft_ms": [1e3 * seconds for seconds in one.ttft_s],
                    "median_ms": 1e3 * statistics.median(one.ttft_s),
                    "ratio": one.ratio,
                }
                for name, one in interrupted.items()
            },
        }

    @property
    def _seeds(self) -> tuple[int, ...]:
        return self._settings.seeds

    @property
    def _requests(self) -> Traffic:
        assert self._traffic is not None  # made on the first stack
        return self._traffic

    @property
    def _beyond_prefill_s(self) -> float:
        """Returns a text's TTFT beyond its prefill: gateway, scheduler, store, handshake."""
        prefill_s = self._prefill.isolated_s(self._tokens["text"])
        return max(self._isolated_s["text"] - prefill_s, 0.0)

    async def _isolate(self, stack: LiveSystem) -> float:
        """Returns the isolated TTFT of a text on this stack; on the first stack, sets all
        objectives.
        """
        repeats = self._settings.repeats
        if self._isolated_s:
            return (await stack.isolated_s({"text": self._tokens["text"]}, repeats))["text"]
        self._isolated_s = await stack.isolated_s(self._tokens, repeats)
        classes = tuple(objectives(self._isolated_s, self._settings.slo_scale))
        longest_s = max(one.ttft_s or 0.0 for one in classes)
        self._traffic = Traffic(
            classes=classes,
            scale=self._settings.scale,
            requests=self._settings.requests,
            most_tokens=self._most_tokens,
            least_s=self._settings.run_objectives * longest_s,
        )
        return self._isolated_s["text"]

    def _simulate(self, system: System, rate_rps: float, seed: int) -> Attainment:
        return hol_sim.attainment(
            system, self._profile, self._requests, rate_rps, seed, self._beyond_prefill_s
        )

    async def _simulated(self, system: System, seed: int, goal: Goal = CARRIED) -> Goodput:
        async def one(rate_rps: float) -> Attainment:
            return self._simulate(system, rate_rps, seed)

        self._announce(f"{system.name}: simulating")
        return await goodput(
            one, 1.0, tolerance=_SIM_TOLERANCE, step=_SIM_STEP, most_runs=_SIM_RUNS, goal=goal
        )

    async def _live(self, stack: LiveSystem, seed: int, expected: Goodput) -> Goodput:
        async def one(rate_rps: float) -> Attainment:
            return await stack.attainment(self._requests, rate_rps, seed)

        settings = self._settings
        if settings.rates:
            return found([await one(rate) for rate in settings.rates])
        least, most = (share * capacity_rps(self._isolated_s) for share in _START)
        return await goodput(
            one,
            min(max(expected.rate_rps, least), most),
            tolerance=settings.tolerance,
            step=settings.step,
            most_runs=settings.most_runs,
        )

    async def _interrupted(self, stack: LiveSystem) -> Interrupted:
        settings = self._settings
        text = next(one for one in self._requests.classes if one.name == "text")
        long_s = self._prefill.isolated_s(settings.long_tokens)
        return await stack.interrupted(
            long=(settings.long_tokens, _LONG_MULTIPLE * long_s),
            short=(self._tokens["text"], text.ttft_s or 0.0),
            repeats=settings.shorts,
            seed=settings.seeds[0],
        )

    def _bounds_rps(self) -> dict[str, float]:
        """Returns the rates that no order exceeds: for the goal, and with the goal of each class,
        in the median of the draws.
        """
        return {
            name: statistics.median(
                self._requests.most_rps(self._prefill.isolated_s, seed, class_goal)
                for seed in self._seeds
            )
            for name, class_goal in (("all", 0.0), ("every_class", CLASS_GOAL))
        }

    def _classes(self) -> dict[str, Any]:
        times = multiples()
        return {
            one.name: {
                "mean_tokens": self._tokens[one.name],
                "isolated_ms": 1e3 * self._isolated_s[one.name],
                "multiple": times[one.name] * self._settings.slo_scale,
                "objective_ms": 1e3 * (one.ttft_s or 0.0),
            }
            for one in self._requests.classes
        }

    def _found(
        self,
        system: System,
        live: Mapping[str, Sequence[Goodput]],
        simulated: Mapping[str, Sequence[Goodput]],
        drift: float,
    ) -> dict[str, Any]:
        """`drift`: a text's isolated TTFT on this system's stack over that on the first stack."""
        own = live[system.name]
        edge = own[0].at_edge
        return {
            "settings": system.settings,
            "live_rps": _median(own),
            "live_ratio": _ratio(live, system.name),
            "simulated_rps": _median(simulated[system.name]),
            "simulated_ratio": _ratio(simulated, system.name),
            "by_seed": [
                {"seed": seed, "live_rps": one.rate_rps, "failed_rps": one.failed_rps}
                for seed, one in zip(self._seeds, own, strict=True)
            ],
            "by_class_at_edge": {} if edge is None else edge.by_class,
            "isolated_drift": drift,
            "runs": [
                {
                    "seed": seed,
                    "rate_rps": run.rate_rps,
                    "total": run.total,
                    "by_class": run.by_class,
                    "stopped": run.stopped,
                    "errors": dict(run.errors),
                    "simulated": self._simulate(system, run.rate_rps, seed).total,
                }
                for seed, one in zip(self._seeds, own, strict=True)
                for run in one.runs
            ],
            "simulated_runs": [
                {"seed": seed, "rate_rps": run.rate_rps, "total": run.total}
                for seed, one in zip(self._seeds, simulated[system.name], strict=True)
                for run in one.runs
            ],
        }


def _median(searches: Sequence[Goodput]) -> float:
    return statistics.median(one.rate_rps for one in searches)


def _ratio(searches: Mapping[str, Sequence[Goodput]], name: str) -> float | None:
    """Returns goodput over that of FCFS; None without a value to compare with."""
    base = _median(searches[FCFS]) if FCFS in searches else 0.0
    return _median(searches[name]) / base if base else None
