"""`millrace bench cdsp`: measures prompts on groups of instances, for Tetris' figures.

All parts run on this machine, with the random model of `bench hol` and one thread per instance:
prompts on 1 to 4 instances as in the paper's Table 1, with communication apart; the cost of cache
balancing and handshakes (section 7.4); the ring's exchange compared with bare NIXL writes; CDSP
compared with single-chunk and fixed groups under load, live and simulated with a profile of the
same run.

Instances share this machine's cores. A group's speedup is at most the number of cores; with more
members than cores they wait for each other: then CPU time shows the cost of a group, but TTFT does
not show its gain on other machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.bench.common.options import LESS, option, read_names, read_numbers
from millrace.bench.common.options import command as made

PARTS = ("sp", "balancing", "ring", "load")

#: (instances that hold the history, instances of the next chunk).
GROWTHS = ((1, 2), (1, 4), (2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """parts: of `PARTS`. threads: per instance. lengths, degrees: prompts on groups of these
    sizes, `rounds` times each. chunk_tokens, shares: a chunk, its history as shares of it.
    instances: the number under load, 0: as many as have cores of their own, 2 to 4; loads: as
    shares of their capacity. operators_s, profile_s: seconds of measuring in this process, and
    live.
    """

    parts: tuple[str, ...] = option(
        PARTS,
        "--parts",
        read=read_names(*PARTS),
        metavar="NAME,...",
        help="Of " + ", ".join(PARTS) + ".",
    )
    threads: int = option(1, "--threads", min=1, help="Of each instance.")
    kv_bytes: int = 1 << 29
    lengths: tuple[int, ...] = option(
        (512, 1024, 2048, 4096),
        "--lengths",
        read=read_numbers(),
        metavar="TOKENS,...",
        help="Prompts of the part sp.",
    )
    degrees: tuple[int, ...] = option(
        (1, 2, 3, 4),
        "--sp",
        read=read_numbers(1),
        shown="2,3,4",
        metavar="N,...",
        help="Instances a prompt; 1 is measured too.",
    )
    rounds: int = option(3, "--rounds", min=1, help="Of the parts sp and balancing.")
    chunk_tokens: int = 768
    shares: tuple[float, ...] = (0.25, 1.0, 2.0)
    growths: tuple[tuple[int, int], ...] = GROWTHS
    ring_mib: tuple[int, ...] = (16,)
    ring_members: tuple[int, ...] = (2, 4)
    ring_repeats: int = 5
    instances: int = option(
        0, "--instances", min=0, help="Under load; 0: as many as have cores, 2 to 4."
    )
    loads: tuple[float, ...] = (0.4, 0.7)
    short_tokens: int = 96
    long_tokens: int = 2048
    requests: int = option(48, "--requests", min=4, help="Of every load.")
    seed: int = 0
    operators_s: float = 6.0
    profile_s: float = 20.0

    def quick(self) -> Settings:
        """Returns settings for a short run: its figures are not to be quoted."""
        return replace(
            self,
            lengths=self.lengths[:3],
            rounds=1,
            shares=self.shares[1:2],
            ring_repeats=2,
            loads=self.loads[-1:],
            requests=min(self.requests, 16),
            operators_s=min(self.operators_s, 2.0),
            profile_s=min(self.profile_s, 6.0),
        )

    @property
    def group_degrees(self) -> tuple[int, ...]:
        """Returns the degrees that the instances under load can form: powers of two, and all of
        them.
        """
        powers = {1 << bits for bits in range(1, self.instances.bit_length())}
        return tuple(sorted(powers | {self.instances}))

    @property
    def fleet(self) -> int:
        """Returns the number of prefill instances that the parts need together."""
        needed = [self.instances] if "load" in self.parts else []
        needed += self.degrees if "sp" in self.parts else ()
        needed += [new for _, new in self.growths] if "balancing" in self.parts else []
        return max(needed, default=0)


command = made(
    Settings,
    "Sequence-parallel groups: TTFT by degree, what they cost, and CDSP under load.",
    plot="PNG: TTFT by degree, balancing, load.",
    quick=LESS,
)
