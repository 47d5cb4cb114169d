"""Checks what a local stack needs before anything of it is started."""

from __future__ import annotations

import asyncio
import socket

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError, MillraceError, ModelError, reason_of
from millrace.engine.model.config import ModelConfig
from millrace.local.options import StackOptions
from millrace.model_folder import DESCRIPTION, resolve_model
from millrace.state.blobs import Blobs
from millrace.state.open import open_store


async def check_start(options: StackOptions) -> None:
    """Raises MillraceError naming the option: a model that is absent or can't be served, an address
    that is taken, a Redis that does not answer, a store of files without its library.

    The services check the same again, later: what they need may disappear in between.
    """
    check_address(options.host, options.port)
    for model, _ in options.models():
        await asyncio.to_thread(check_model, model)
    if options.redis:
        await check_redis(options.redis)
    if options.files:
        Blobs(options.files)


def check_address(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"--host {host}, --port {port}: {reason_of(error)}") from error


def check_model(model: str) -> None:
    """Reads the model's config.json. Raises ModelError."""
    try:
        ModelConfig.from_folder(resolve_model(model, DESCRIPTION))
    except ModelError as error:
        raise ModelError(f"--model {error}") from error


async def check_redis(url: str) -> None:
    """Raises ConfigError if no Redis answers at the URL."""
    if url.startswith("memory://"):
        raise ConfigError(
            f"--redis {url}: the services are processes, which share no memory; without --redis "
            "they get a Redis of their own"
        )
    try:
        store = open_store(StoreConfig(url=url))
        try:
            await store.ping()
        finally:
            await store.close()
    except MillraceError as error:
        raise ConfigError(f"--redis or store.url: {error}") from error
