"""Mnemosyne, sections 4 and 6: one long prompt on TP8 servers, pass by pass.

Shared by its experiments. A run takes a prompt through the packer and the operator model that mixed
instances use, without arrivals or queues: the paper's figures are of one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.instance.packing import Packer, PackingConfig
from millrace.profiles import load_profile
from millrace.sim.cluster.sharded_passes import ShardedPasses, spread_pass_s

MILLION = 1_000_000

H100 = "llama3-8b-h100-tp8"
A100 = "llama3-8b-a100-tp8"
LARGE_H100 = "llama3-70b-h100-tp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The fields of a request that packing reads."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The decodes in every iteration: how many, and the tokens of context of each."""

    decodes: int = 0
    context_tokens: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One iteration: history before it, its chunk, its seconds, and the KVP workers in it."""

    history: int
    tokens: int
    seconds: float
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """KV parallelism: tokens of the request at a worker, and how many workers there are."""

    shard_tokens: int
    workers: int

    def degree(self, context: int) -> int:
        return min(max(ceil_div(context, self.shard_tokens), 1), self.workers)


NO_KVP = Sharding(shard_tokens=1 << 40, workers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary of all iterations of a prefill, in seconds.

    `total_s`: one after the other, one stage.
    """

    total_s: float
    p50_s: float
    p95_s: float
    worst_s: float
    iterations: int


def operators(name: str) -> OperatorModel:
    return load_profile(name).operators


def static(chunk_tokens: int, beside: Beside) -> PackingConfig:
    """Returns chunks of so many prompt tokens; decodes are not counted."""
    return PackingConfig(
        t_target_s=1.0, adaptive=False, fixed_chunk_tokens=chunk_tokens + beside.decodes
    )


def passes(
    model: OperatorModel,
    packing: PackingConfig,
    tokens: int,
    beside: Beside,
    sharding: Sharding = NO_KVP,
) -> Iterator[Pass]:
    """Yields the iterations of a prompt's prefill."""
    packer = Packer(ShardedPasses(model, sharding.shard_tokens, sharding.workers), packing)
    prompt, done = Prompt(prompt_tokens=tokens), 0
    context = beside.decodes * beside.context_tokens
    while done < tokens:
        [(_, chunk)] = packer.pack(beside.decodes, context, [(prompt, done)], lambda _: 0.0)
        workers = sharding.degree(done + chunk)
        shape = BatchShape(
            prefills=((chunk, done),), decodes=beside.decodes, decode_context_tokens=context
        )
        seconds = spread_pass_s(model, shape, [workers])
        yield Pass(history=done, tokens=chunk, seconds=seconds, workers=workers)
        done += chunk


def summary(ran: list[Pass]) -> Summary:
    ordered = sorted(one.seconds for one in ran)
    at = partial(_quantile, ordered)
    return Summary(
        total_s=sum(ordered),
        p50_s=at(0.5),
        p95_s=at(0.95),
        worst_s=ordered[-1],
        iterations=len(ordered),
    )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def staged_s(model: OperatorModel, pass_s: float, stages: int) -> float:
    """Returns the seconds on one of `stages` (as in mixed instances; see
    `sim.models.mixed_model`)."""
    return model.overhead_s + (pass_s - model.overhead_s) / stages


def step_s(model: OperatorModel, context: int, stages: int = 1, kvp: int = 1) -> float:
    """Returns the seconds between two tokens of one request with this context, alone."""
    step_s = model.decode_step_s(1, context, kvp)
    return staged_s(model, step_s, stages) * stages
