"""Defines the metrics of the shards that a KVP worker holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from millrace.instance.shards.shard_table import ShardTable
from millrace.telemetry.metrics import Registry
from millrace.transfer.kvp.server import ShardCompute

#: Seconds; a layer for one KV owner takes from tens of microseconds to tens of milliseconds.
LAYER_BUCKETS = tuple(25e-6 * 2**i for i in range(14))


class ShardMetrics:
    """The metrics of held shards. Safe to use from any thread."""

    def __init__(self, registry: Registry, table: ShardTable) -> None:
        registry.gauge_function(
            "millrace_kvp_held_shards",
            "shards of requests whose KV owner is another instance",
            lambda: len(table),
        )
        registry.gauge_function(
            "millrace_kvp_held_pages",
            "KV pages of these shards",
            lambda: sum(len(shard.pages) for shard in table),
        )
        self.lost = registry.counter(
            "millrace_kvp_lost_shards_total", "shards lost before their KV owners released them"
        )
        self.layer_s = registry.histogram(
            "millrace_kvp_layer_seconds",
            "attention of one layer over shards, for one KV owner",
            buckets=LAYER_BUCKETS,
        )


class TimedShards:
    """A `ShardCompute` that times each layer."""

    def __init__(
        self,
        compute: ShardCompute,
        took_s: Callable[[float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`took_s` gets the seconds of each layer, by `clock`."""
        self._compute = compute
        self._took_s = took_s
        self._clock = clock
        self.open = compute.open
        self.landed = compute.landed
        self.close = compute.close
        self.begin = compute.begin
        self.forget = compute.forget

    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        begun_s = self._clock()
        missing = self._compute.layer(slot, piece, layer)
        self._took_s(self._clock() - begun_s)
        return missing
