"""Load survives protobuf: an unmeasured signal is absent, not zero."""

from __future__ import annotations

import pytest

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import Context
from millrace.wire.codec.status import fleet_load, load_message
from millrace.wire.pb import scheduler_pb2

SIGNALS = ("backlog_s", "arriving", "ttft_slo_ratio", "kv_utilisation", "tbt_slo_ratio")


def over_the_wire(load: FleetLoad) -> FleetLoad:
    return fleet_load(scheduler_pb2.LoadReply.FromString(load_message(load).SerializeToString()))


def test_every_field_arrives():
    contexts = (
        Context(tokens=1, final_tokens=2, growth_tokens_s=0.5, owner_tokens=4),
        Context(tokens=1 << 40, final_tokens=1 << 41),
    )
    load = FleetLoad(
        pools={
            "mixed": PoolLoad(
                role="mixed",
                ready=1,
                draining=2,
                active_requests=3,
                **{name: number + 0.5 for number, name in enumerate(SIGNALS)},
            ),
            "kvp": PoolLoad(role="kvp", contexts=contexts),
        },
        parked_requests=9,
    )
    assert over_the_wire(load) == load


@pytest.mark.parametrize("signal", SIGNALS)
def test_nothing_measured_differs_from_nothing(signal):
    for value in (None, 0.0):
        load = FleetLoad(pools={"prefill": PoolLoad(role="prefill", **{signal: value})})
        assert over_the_wire(load) == load
