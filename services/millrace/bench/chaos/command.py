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

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_names
from millrace.shipped import SHIPPED_MODEL

INSTANCES = ("prefill", "decode", "colocated", "kvp")
#: What faults hit, as far as the layout has it. A member is a rank or a later stage of an instance,
#: which is a process of its own. The store is the private Redis, which is killed with or without
#: its data.
DEFAULT_TARGETS = (*INSTANCES, "member", "scheduler", "store", "proxy")
TARGETS = (*DEFAULT_TARGETS, "store-data")
RESUMABLE = ("completion", "tool")
ANSWERS = (*RESUMABLE, "choices", "logprobs", "beams", "response", "background", "batch")


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
    colocated: int = option(
        0, "--colocated", min=0, help="Instances that prefill and decode, in place of these."
    )
    role: str = option("mixed", "--role", metavar="pair|mixed", help="Of --colocated, as of `up`.")
    kvp: int = option(0, "--kvp", min=0, help="KVP workers.")
    spread_tokens: int = option(
        256, "--spread-tokens", min=1, help="With --kvp: longer requests are spread."
    )
    sp: int = option(1, "--sp", min=1, help="Prefill instances that compute a prompt together.")
    stack_settings: Sequence[str] | None = option(
        None,
        "--set",
        kind=list[str] | None,
        metavar="[ROLE:]SECTION.FIELD=VALUE",
        help="A setting of all services, or of a role's instances; repeatable.",
    )
    tls: bool = option(False, "--tls", help="Mutual TLS between the services.")
    schedulers: int = option(2, "--schedulers", min=1, help="One leads, the others stand by.")
    answers: tuple[str, ...] = option(
        ("completion",),
        "--answers",
        read=read_names(*ANSWERS),
        metavar="NAMES",
        help=f"The kinds of answers, of {', '.join(ANSWERS)}.",
    )
    streams: int = option(6, "--streams", min=1, help="Streams at a time.")
    pause_s: float = option(
        3.0, "--pause-s", min=0.0, help="Mean seconds from a recovery to the next fault."
    )
    prompts: int = option(12, "--prompts", min=2, help="Different prompts.")
    prompt_tokens: int = option(600, "--prompt-tokens", min=8, help="Longest prompt.")
    output_tokens: int = option(160, "--output-tokens", min=2, help="Longest answer.")
    lease_s: float = option(2.0, "--lease-s", min=0.5, help="scheduler.lease_s of the stack.")
    logs: str = option("", "--logs", metavar="FOLDER", help="Keep the services' logs there.")

    @property
    def folder(self) -> str:
        return self.model or str(SHIPPED_MODEL)

    def role_settings(self) -> dict[str, list[str]]:
        """Returns the settings of `--set` by role; those of all services at ""."""
        found: dict[str, list[str]] = {"": []}
        for one in self.stack_settings or ():
            role, colon, setting = one.partition(":")
            if colon and role in INSTANCES:
                found.setdefault(role, []).append(setting)
            else:
                found[""].append(one)
        return found


command = made(
    Settings,
    "Random faults in a live stack under load: right answers, explicit errors, leaks, recovery.",
    plot="PNG: answers and faults over time, recovery times.",
)
