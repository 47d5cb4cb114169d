"""A profile with round numbers, and short ways to run simulations of it."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.core.cost.profile import Profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.workload import PlannedRequest, SloClass

LAYERS = 4
OVERHEAD_S = 1e-3
#: Seconds of one layer's qkv_proj, o_proj, gate_up_proj, down_proj for a token.
LINEAR_S = (1e-6, 1e-6, 2e-6, 1e-6)
ATTN_S = 1e-9  # of one layer, for L^2 + 2 C L
DECODE_ATTN_S = 1e-8  # of one layer, for a token of context


def _line(slope: float) -> Table:
    return Table(xs=(0.0, 1e6), ys=(0.0, slope * 1e6))


def toy_operators() -> OperatorModel:
    qkv, o, gate_up, down = map(_line, LINEAR_S)
    return OperatorModel(
        layers=LAYERS,
        qkv_proj=qkv,
        o_proj=o,
        gate_up_proj=gate_up,
        down_proj=down,
        attn=_line(ATTN_S),
        history_factor=Table(xs=(1.0,), ys=(1.0,)),
        kv_read_s=0.0,
        decode_attn=DecodeAttention(batches=(1,), tables=(_line(DECODE_ATTN_S),)),
        lm_head=Table(xs=(1.0,), ys=(0.0,)),
        overhead_s=OVERHEAD_S,
        kvp_message_s=1e-5,
        kvp_token_s=0.0,
    )


def toy_profile() -> Profile:
    """Returns a profile on whose single instance Eq. (1) and the operators agree.

    A group of s is s times as fast. KV is 4000 bytes per token (1000 per layer), 1e6 bytes per
    second between instances.
    """
    b, d = LAYERS * sum(LINEAR_S), LAYERS * ATTN_S
    return Profile(
        name="toy",
        model="toy",
        device="none",
        tp=1,
        layers=LAYERS,
        kv_bytes_per_token=4000,
        prefill=SpLatency(
            by_sp={
                sp: Latency(a=OVERHEAD_S, b=b / sp, c=2 * d / sp, d=d / sp) for sp in (1, 2, 4, 8)
            }
        ),
        operators=toy_operators(),
        kv_transfer_bytes_s={"rdma": 1e9, "nvlink": 1e10},
        ring_step_s=0.0,
    )


def prefill_s(tokens: int, history: int = 0, sp: int = 1) -> float:
    return toy_profile().prefill.chunk_s(tokens, history, sp)


def decode_step_s(batch: int, context: float) -> float:
    """Returns the seconds of a step by the numbers above."""
    return OVERHEAD_S + LAYERS * (sum(LINEAR_S) * batch + DECODE_ATTN_S * context)


ANY = SloClass(name="any", ttft_s=1.0, tbt_s=0.1)


def planned(
    index: int, arrival_s: float, tokens: int, new: int = 1, slo: SloClass = ANY
) -> PlannedRequest:
    return PlannedRequest(
        index=index, arrival_s=arrival_s, input_tokens=tokens, output_tokens=new, slo=slo
    )


def toy_spec(scheduler: SchedulerConfig | None = None, **fields) -> SimSpec:
    """Returns one prefill and one decode instance, without latency between processes."""
    given = {"prefill": 1, "decode": 1, "control_s": 0.0, "handshake_s": 0.0, **fields}
    return SimSpec(
        profile=toy_profile(),
        scheduler=scheduler or SchedulerConfig(max_queue_requests=10**6, max_queue_s=1e9),
        **given,
    )


class Run:
    """A simulation that ran, with every record."""

    def __init__(self, spec: SimSpec, requests: Iterable[PlannedRequest], **more) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.collector = Collector(self._keep)
        self.simulation = Simulation(spec, iter(requests), self.collector, **more)
        self.counters = self.simulation.run()

    def _keep(self, record: RequestRecord) -> None:
        assert record.index not in self.records, "a request ended twice"
        self.records[record.index] = record
