"""`millrace bench overload`: what a stack serves at several times the load that it can sustain.

One prefill and one decode instance serve the random model of `bench autoscale`, one thread each. A
sweep over rising rates finds the peak of goodput (requests a second whose first token is in time)
and the sustainable rate: the highest one with 90 % of the first tokens in time. Then three phases
follow each other without a pause: half of the sustainable rate, `--factor` times that rate, and
half of it again. The document has

- goodput in the overload, over the peak;
- the time in which refused requests get their 429;
- the memory of each service over time;
- the recovery: from the end of the overload until 90 % of the requests that come are in time again,
  over the drain time, in which the work that waits then is served at the rate of the overload.

The client and all services share this machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_rates
from millrace.bench.common.phases import Lengths, Phase

CALM_LOAD = 0.5  # of the sustainable rate, before and after the overload
#: Of the overload, until the queue is full: goodput is counted after it.
FILLING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options."""

    factor: float = option(
        5.0, "--factor", min=1.1, help="Rate of the overload, in sustainable rates."
    )
    loads: tuple[float, ...] = option(
        (0.3, 0.5, 0.7, 0.9, 1.1, 1.3),
        "--loads",
        read=read_rates,
        metavar="SHARES",
        help="Rates of the sweep, in rates of prompts one after another.",
    )
    sweep_s: float = option(20.0, "--sweep-s", min=1.0, help="Seconds of each rate of the sweep.")
    calm_s: float = option(10.0, "--calm-s", min=1.0, help="Seconds before the overload.")
    overload_s: float = option(60.0, "--overload-s", min=4.0)
    after_s: float = option(60.0, "--after-s", min=2.0, help="Seconds after the overload.")
    slo_factor: float = option(
        10.0, "--slo", min=1.0, help="TTFT objective, in TTFTs of a prompt alone."
    )
    queue_s: float = option(
        5.0,
        "--queue-s",
        min=0.1,
        help="scheduler.max_queue_s: with more seconds of work queued, new requests get 429.",
    )
    prompt_tokens: int = option(512, "--prompt-tokens", min=16)
    output_tokens: int = option(16, "--output-tokens", min=1)
    policy: str = option("millrace", "--policy", help="scheduler.policy.")
    threads: int = 1
    kv_bytes: int = 1 << 30
    seed: int = option(0, "--seed", help="Of arrivals, lengths and prompts.")

    @property
    def lengths(self) -> Lengths:
        return Lengths(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        return (
            Phase(name="before", load=CALM_LOAD, seconds=self.calm_s),
            Phase(name="overload", load=self.factor, seconds=self.overload_s),
            Phase(name="after", load=CALM_LOAD, seconds=self.after_s),
        )

    @property
    def full_s(self) -> float:
        """When the queue is full, in seconds since the first phase's begin."""
        return self.calm_s + FILLING * self.overload_s

    @property
    def end_s(self) -> float:
        """When the overload ends."""
        return self.calm_s + self.overload_s


command = made(
    Settings,
    "Several times the sustainable load: goodput, refusals, memory, recovery.",
    plot="PNG: requests by their end over time, memory.",
)
