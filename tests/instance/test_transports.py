"""The transport of an instance's KV: what it refuses before it opens."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from millrace.core.errors import ConfigError
from millrace.core.incarnation import Incarnation
from millrace.engine.assembly import open_engines
from millrace.instance.transfer.transports import open_transport
from support.tiny_models import model_folder
from support.worker_roles import config


async def test_checksums_of_a_pool_in_several_processes_are_refused_at_start() -> None:
    (engine,) = open_engines(model_folder("llama"), config(kv_bytes=1 << 20).engine, 1)
    ranked = replace(engine, layout=replace(engine.layout, copies=2))  # two ranks with own pools
    try:
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match=r"kv_checksum is 'on'.*memory of 2 processes"):
                await open_transport(
                    stack,
                    "127.0.0.1",
                    Incarnation("prefill-0", 1),
                    ranked,
                    checksums=True,
                    on_corrupt=print,
                )
    finally:
        engine.close()
