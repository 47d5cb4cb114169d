"""`millrace proxy`: serves until a signal, in this process or in several that share its port."""

from __future__ import annotations

from collections.abc import Callable

from millrace.concurrency import stop_signals
from millrace.core.config import Config
from millrace.core.config.models import ModelConfig
from millrace.proxy.garbage import return_large_blocks, spare_old_objects
from millrace.proxy.service import Proxy, listen
from millrace.proxy.workers import serve_workers


async def serve(
    config: Config,
    model: ModelConfig | None = None,
    *,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains: `config.proxy.drain_timeout_s` at most.

    Serves `model`, or else the models of `proxy.models_file`. `on_ready` gets the HTTP port once
    connections are accepted; /ready reports when requests would succeed. `config.proxy.workers`
    processes share the port. Raises ModelError for an unusable model, ConfigError for a wrong file
    of models, MillraceError if the port is taken.
    """
    with stop_signals() as stop:
        if config.proxy.workers > 1:
            await serve_workers(config, model, stop=stop, on_ready=on_ready)
            return
        proxy = Proxy(config, model)
        await proxy.start(listen(config.proxy.host, config.proxy.port))
        spare_old_objects()
        return_large_blocks()
        if on_ready is not None:
            on_ready(proxy.port)
        await proxy.run_until(stop)
