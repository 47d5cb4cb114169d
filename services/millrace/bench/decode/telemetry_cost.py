"""`millrace bench decode --telemetry`: what traces, waterfalls, metrics and reports cost instances.

Two stacks on this machine take turns with the same requests: one with all telemetry on (every trace
sampled and written to files, waterfalls, outcomes for `millrace report`, the access log, metrics
that are read twice a second), one with all of it off.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from millrace.bench.common.random_model import write_random_model
from millrace.bench.decode.command import Settings
from millrace.bench.decode.served import Answers, Served, free_port, stack_options
from millrace.local.stack import Stack

OFF: Final = (
    "telemetry.waterfall_bytes=0",
    "telemetry.report_requests=0",
    "proxy.access_log=off",
)
_INSTANCES: Final = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One round of one stack. `instances_cpu_s`: of prefill and decode; `others_cpu_s`: of gateway,
    scheduler and client.
    """

    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    instances_cpu_s: float
    others_cpu_s: float

    @classmethod
    def of(cls, answers: Answers) -> Turn:
        cpu_s = answers.cpu_s
        return cls(
            prompt_tokens_per_s=answers.prompt_tokens_per_s,
            decode_tokens_per_s=answers.window.tokens_per_s,
            instances_cpu_s=sum(cpu_s[name] for name in _INSTANCES),
            others_cpu_s=sum(s for name, s in cpu_s.items() if name not in _INSTANCES),
        )


def ratios(on: Sequence[Turn], off: Sequence[Turn]) -> dict[str, float]:
    """Returns the median of on / off over the pairs of turns, by figure."""
    pairs = [(asdict(one), asdict(base)) for one, base in zip(on, off, strict=True)]
    return {
        name: statistics.median(one[name] / base[name] for one, base in pairs)
        for name in pairs[0][0]
    }


async def run(settings: Settings, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the report. Raises MillraceError as `bench decode` does."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder, "traces")
        turns = await _take_turns(settings, Path(folder), traces, on_progress)
        # Now that the stack has stopped: until then spans may wait for the next export.
        traced = _bytes_in(traces)
    return {
        "telemetry": {name: [asdict(turn) for turn in found] for name, found in turns.items()},
        "ratios": ratios(turns["on"], turns["off"]),
        "trace_bytes": traced,
    }


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def _take_turns(
    settings: Settings, folder: Path, traces: Path, on_progress: Callable[[str], None]
) -> dict[str, list[Turn]]:
    """Runs both stacks, with a model in `folder`; returns their turns by "on" and "off"."""
    turns: dict[str, list[Turn]] = {"on": [], "off": []}
    async with AsyncExitStack() as around:
        model = write_random_model(folder, settings.model)
        on = (f"telemetry.trace_folder={traces}", "telemetry.trace_ratio=1", "proxy.access_log=on")
        served: dict[str, Served] = {}
        for name, chosen in (("on", on), ("off", OFF)):
            ports = {role: free_port() for role in ("prefill", "decode")} if name == "on" else {}
            options = stack_options(model, settings, chosen, ports)
            stack = await around.enter_async_context(Stack(options, on_progress))
            served[name] = Served(stack, settings, ports.get("decode", 0))
            around.callback(served[name].close)
        for name, one in served.items():
            on_progress(f"warming up the stack with telemetry {name}")
            await one.warm_up()
        for number in range(settings.rounds):
            on_progress(f"round {number + 1} of {settings.rounds}")
            order = list(served) if number % 2 else list(reversed(served))
            for name in order:
                turns[name].append(Turn.of(await served[name].measure(number)))
    return turns
