"""`millrace bench chaos`: faults in a live stack under load, and whether every answer stays right.

A stack of real processes serves streams of a fixed set of prompts: greedy, sampled by a seed, and
under a constraint. Their clients resume streams that break, and send again what is refused. Every
answer is compared, token by token, with that of the same prompt alone, before any fault. Meanwhile
a service is killed (SIGKILL), or stopped for a while (SIGSTOP) so that it looks hung, again and
again, each chosen by the seed. After each fault, requests are sent until one is answered: the
recovery time. At the end the stack is stopped, and every process reports what a request has left
behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_names
from millrace.shipped import SHIPPED_MODEL

#: What faults hit. The store is the private Redis, which is killed with or without its data.
TARGETS = ("prefill", "decode", "kvp", "scheduler", "store", "store-data", "proxy")
DEFAULT_TARGETS = ("prefill", "decode", "scheduler", "store", "proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options. A stop lasts up to three times `lease_s`."""

    seed: int = option(0, "--seed", help="Of the faults, their times and the prompts.")
    minutes: float = option(5.0, "--minutes", min=0.05, help="Time under faults.")
    model: str = option("", "--model", help="A folder with a model; empty: the shipped model.")
    targets: tuple[str, ...] = option(
        DEFAULT_TARGETS,
        "--targets",
        read=read_names(*TARGETS),
        metavar="NAMES",
        help=f"What faults hit, of {', '.join(TARGETS)}.",
    )
    prefill: int = option(2, "--prefill", min=1, help="Prefill instances.")
    decode: int = option(2, "--decode", min=1, help="Decode instances.")
    kvp: int = option(0, "--kvp", min=0, help="KVP workers.")
    spread_tokens: int = option(
        256, "--spread-tokens", min=1, help="With --kvp: longer requests are spread."
    )
    sp: int = option(1, "--sp", min=1, help="Prefill instances that compute a prompt together.")
    schedulers: int = option(2, "--schedulers", min=1, help="One leads, the others stand by.")
    streams: int = option(6, "--streams", min=1, help="Streams at a time.")
    pause_s: float = option(
        3.0, "--pause-s", min=0.0, help="Mean seconds from a recovery to the next fault."
    )
    prompts: int = option(12, "--prompts", min=2, help="Different prompts.")
    prompt_tokens: int = option(600, "--prompt-tokens", min=8, help="Longest prompt.")
    output_tokens: int = option(160, "--output-tokens", min=2, help="Longest answer.")
    lease_s: float = option(2.0, "--lease-s", min=0.5, help="scheduler.lease_s of the stack.")

    @property
    def folder(self) -> str:
        return self.model or str(SHIPPED_MODEL)


command = made(
    Settings,
    "Random faults in a live stack under load: right answers, explicit errors, leaks, recovery.",
    plot="PNG: answers and faults over time, recovery times.",
)
