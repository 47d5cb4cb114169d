"""Runs `millrace bench predictions`: prompts one after another, each traced by the gateway.

It compares `predicted_ttft_ms` and `ttft_ms` of `x-millrace-trace`, as a client gets them. The
model is measured again, as `millrace up` does before a first start.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from millrace.bench.common.options import Announce
from millrace.bench.predictions.command import Settings
from millrace.core.config import load_config
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.local.up import measure_first
from millrace.shipped import SHIPPED_MODEL

#: Ids that stand for words in the shipped tokenizer.
IDS = (10, 1500)
#: Prompts that are not counted: their requests connect the instances.
WARM = 3
SPIN = "while True: pass"


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt: its tokens, and times in seconds."""

    tokens: int
    predicted_s: float
    real_s: float

    @property
    def error(self) -> float:
        """Returns the relative error, above 0 where the token came sooner than predicted."""
        return self.predicted_s / self.real_s - 1.0


async def run(settings: Settings, announce: Announce) -> dict[str, Any]:
    """Measures and returns the report. Raises MillraceError when a request fails."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        model = _widened(Path(folder) / "millrace-tiny", max(settings.lengths) + 64)
        profiles = f"engine.profile_cache={folder}/profiles"
        options = StackOptions(
            model=str(model),
            prefill=settings.prefill,
            decode=1,
            port=0,
            threads=settings.threads,
            settings=[profiles],
            profile=load_config(None, [profiles]).engine,
        )
        announce("measuring the model")
        await measure_first(options, settings.budget_s)
        announce("starting the stack")
        async with (
            Stack(options) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=None) as client,
        ):
            draw = random.Random(1)
            for _ in range(WARM):
                await _ask(client, draw, min(settings.lengths))
            passes = {"idle": await _pass(client, settings, draw, announce, "idle")}
            if settings.busy:
                with busy_processes(settings.busy):
                    found = await _pass(client, settings, draw, announce, "busy")
                passes["busy"] = found
    return {
        "settings": asdict(settings),
        **{name: summary(found) for name, found in passes.items()},
    }


def summary(found: Sequence[Asked]) -> dict[str, Any]:
    """Returns errors by length and of all, as shares; each prompt under `prompts`."""

    def of(some: Sequence[Asked]) -> dict[str, float]:
        errors = sorted(abs(one.error) for one in some)
        return {
            "prompts": len(errors),
            "median_error": median(errors),
            "p95_error": errors[min(round(0.95 * len(errors)), len(errors) - 1)],
            "predicted_s": median(one.predicted_s for one in some),
            "real_s": median(one.real_s for one in some),
        }

    lengths = sorted({one.tokens for one in found})
    return {
        "all": of(found),
        "lengths": {str(n): of([one for one in found if one.tokens == n]) for n in lengths},
        "prompts": [asdict(one) for one in found],
    }


async def _pass(
    client: httpx.AsyncClient,
    settings: Settings,
    draw: random.Random,
    announce: Announce,
    name: str,
) -> list[Asked]:
    order, found = settings.order(), []
    for number, tokens in enumerate(order, 1):
        announce(f"{name} ({number} of {len(order)}: {tokens} tokens)")
        found.append(await _ask(client, draw, tokens))
    return found


async def _ask(client: httpx.AsyncClient, draw: random.Random, tokens: int) -> Asked:
    """Sends a new prompt, so that no cache has its beginning."""
    response = await client.post(
        "/v1/completions",
        json={
            "model": "millrace-tiny",
            "prompt": [draw.randrange(*IDS) for _ in range(tokens)],
            "max_tokens": 2,
        },
        headers={"x-millrace-trace": "1"},
    )
    if response.status_code != 200:
        raise MillraceError(f"a prompt of {tokens} tokens: {response.text}")
    traced = response.json()["millrace"]
    return Asked(tokens, traced["predicted_ttft_ms"] / 1e3, traced["ttft_ms"] / 1e3)


def _widened(folder: Path, context_tokens: int) -> Path:
    """Returns a copy of the shipped model with room for `context_tokens`."""
    shutil.copytree(SHIPPED_MODEL, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], context_tokens)
    path.write_text(json.dumps(config))
    return folder


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` processes that compute all the time."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
