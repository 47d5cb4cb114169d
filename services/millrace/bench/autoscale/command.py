"""`millrace bench autoscale`: compares an autoscaled stack with stacks of fixed size.

All stacks run one after another on this machine, with the random model of `bench hol` and one
thread per instance. Each gets the same requests in a calm phase, a peak and another calm phase. The
first stack has the least number of prefill instances, the second scales from the least to the most
(`millrace up --autoscale`), the third has the most. The result is the share of requests with a
first token in time, and the seconds of prefill instances used. A run fails if it loses a request.

Rates and objectives are relative to one instance's capacity here, measured first. Instances share
this machine's cores with the scheduler, the proxy, decode and the client: a second prefill instance
adds less capacity than on a machine of its own, and its start takes time from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option
from millrace.bench.common.phases import Lengths, Phase
from millrace.core.config import ScalingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """most: prefill instances. slo_factor: TTFT objective over the TTFT of a prompt alone."""

    calm: float = option(0.3, "--calm", min=0.01, help="Load of one instance's capacity.")
    peak: float = option(1.4, "--peak", min=0.01, help="Likewise.")
    calm_s: float = option(10.0, "--calm-s", min=1.0, help="Seconds of the first calm.")
    peak_s: float = option(35.0, "--peak-s", min=1.0)
    after_s: float = option(60.0, "--after-s", min=1.0, help="Seconds of the second calm.")
    most: int = option(2, "--most", min=2, help="Prefill instances at most.")
    slo_factor: float = option(
        5.0, "--slo", min=1.0, help="TTFT objective, in TTFTs of a prompt alone."
    )
    prompt_tokens: int = option(768, "--prompt-tokens", min=16)
    output_tokens: int = 8
    threads: int = 1
    kv_bytes: int = 1 << 30  # decode holds all waiting requests: only prefill is scaled
    seed: int = option(0, "--seed", help="Of arrivals, lengths and prompts.")
    scaling: ScalingConfig = field(
        default_factory=lambda: ScalingConfig(
            interval_s=1.0, up_period_s=5.0, down_window_s=6.0, down_period_s=5.0
        )
    )

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        return (
            Phase(name="calm", load=self.calm, seconds=self.calm_s),
            Phase(name="peak", load=self.peak, seconds=self.peak_s),
            Phase(name="calm again", load=self.calm, seconds=self.after_s),
        )

    @property
    def lengths(self) -> Lengths:
        return Lengths(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    def systems(self) -> dict[str, tuple[int, int]]:
        """Returns least and most prefill instances, by name."""
        return {
            "fixed, 1": (1, 1),
            f"autoscaled, 1 to {self.most}": (1, self.most),
            f"fixed, {self.most}": (self.most, self.most),
        }


command = made(
    Settings,
    "Autoscaling beside fixed sizes: SLO attainment and instance-seconds in calm and peak.",
    plot="PNG: load, backlog, instances, attainment.",
)
