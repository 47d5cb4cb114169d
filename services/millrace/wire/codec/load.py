"""Translates between the scheduler's load messages and the core's `FleetLoad`."""

from __future__ import annotations

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import Context
from millrace.wire.pb import scheduler_pb2

_SIGNALS = ("backlog_s", "arriving", "ttft_slo_ratio", "kv_utilisation", "tbt_slo_ratio")


def load_message(load: FleetLoad) -> scheduler_pb2.LoadReply:
    return scheduler_pb2.LoadReply(
        pools=[_pool_message(pool) for pool in load.pools.values()],
        parked_requests=load.parked_requests,
    )


def _pool_message(pool: PoolLoad) -> scheduler_pb2.PoolLoad:
    return scheduler_pb2.PoolLoad(
        role=pool.role,
        ready=pool.ready,
        draining=pool.draining,
        active_requests=pool.active_requests,
        contexts=[
            scheduler_pb2.KvContext(
                tokens=context.tokens,
                final_tokens=context.final_tokens,
                growth_tokens_s=context.growth_tokens_s,
                home_tokens=context.home_tokens,
            )
            for context in pool.contexts
        ],
        **{name: getattr(pool, name) for name in _SIGNALS},
    )


def fleet_load(message: scheduler_pb2.LoadReply) -> FleetLoad:
    """Decodes a fleet's load. An absent signal was not measured."""
    return FleetLoad(
        pools={pool.role: _pool(pool) for pool in message.pools},
        parked_requests=message.parked_requests,
    )


def _pool(message: scheduler_pb2.PoolLoad) -> PoolLoad:
    signals = {
        name: getattr(message, name) if message.HasField(name) else None for name in _SIGNALS
    }
    return PoolLoad(
        role=message.role,
        ready=message.ready,
        draining=message.draining,
        active_requests=message.active_requests,
        contexts=tuple(
            Context(
                tokens=context.tokens,
                final_tokens=context.final_tokens,
                growth_tokens_s=context.growth_tokens_s,
                home_tokens=context.home_tokens,
            )
            for context in message.contexts
        ),
        **signals,
    )
