"""`millrace bench overload`: what a stack serves at several times the load that it can sustain.

One prefill and one decode instance serve the random model of `bench autoscale`, one thread each. A
sweep over rising rates finds the sustainable rate: the highest one with 90 % of the first tokens in
time. Then phases follow each other without a pause: half of that rate; the peak and the overload in
turns; half of that rate again. The peak is the first rate that the sweep found too high: the stack
has work all the time there, and refuses little. The overload is `--factor` times the sustainable
rate. The document has

- goodput (first tokens in time per second) in the overload, over that of the peak. Both are
  counted in the same way: the first tokens that come in the last three quarters of a phase. Earlier
  ones are of the phase before, or of a queue that is not full yet; later ones would be added to
  the peak by the requests that are still waiting at its end;
- the same per second of the prefill instance's compute thread, and the shares of the time in which
  that thread ran and in which it waited for a core: other work on the machine changes goodput, and
  hardly changes goodput per second of compute;
- the time in which refused requests get their 429, and how late the client's own timers were: any
  process that wakes waits so long for a core;
- the memory of each service over time;
- the recovery: from the end of the last overload until 90 % of the requests that come are in time
  again, over the drain time, in which the work that waits then is served at the rate of the
  overload.

The client and all services share this machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_rates
from millrace.bench.common.phases import Lengths, Phase

CALM_LOAD = 0.5  # of the sustainable rate, before and after the turns
PEAK, OVERLOAD = "peak", "overload"
#: Of a phase, until its first tokens count.
FILLING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options."""

    factor: float = option(
        5.0, "--factor", min=1.1, help="Rate of the overload, in sustainable rates."
    )
    loads: tuple[float, ...] = option(
        (0.5, 0.7, 0.9, 1.1, 1.3),
        "--loads",
        read=read_rates,
        metavar="SHARES",
        help="Rates of the sweep, in rates of prompts one after another.",
    )
    sweep_s: float = option(20.0, "--sweep-s", min=1.0, help="Seconds of each rate of the sweep.")
    calm_s: float = option(5.0, "--calm-s", min=1.0, help="Seconds before the first turn.")
    overload_s: float = option(
        20.0, "--overload-s", min=4.0, help="Seconds of each overload, and of each peak."
    )
    turns: int = option(3, "--turns", min=1, help="Of the peak and the overload.")
    after_s: float = option(30.0, "--after-s", min=2.0, help="Seconds after the last overload.")
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

    def phases(self, peak_load: float) -> tuple[Phase, ...]:
        """Returns the phases in order; loads are in sustainable rates."""
        turns = [
            Phase(name=f"{name} {turn}", load=load, seconds=self.overload_s)
            for turn in range(1, self.turns + 1)
            for name, load in ((PEAK, peak_load), (OVERLOAD, self.factor))
        ]
        return (
            Phase(name="before", load=CALM_LOAD, seconds=self.calm_s),
            *turns,
            Phase(name="after", load=CALM_LOAD, seconds=self.after_s),
        )


command = made(
    Settings,
    "Several times the sustainable load: goodput, refusals, memory, recovery.",
    plot="PNG: requests by their end over time, memory.",
)
