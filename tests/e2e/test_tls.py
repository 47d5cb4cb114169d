"""A whole stack that speaks TLS: tokens stream, strangers are refused, renewal needs no restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from millrace.core.config import TlsConfig
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, get_settings
from millrace.wire.tls import use_tls
from support.certificates import Authority, needs_openssl, tls_config, tls_settings
from support.command import millrace
from support.deadlines import HANG_S
from support.live_stack import greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

pytestmark = [needs_openssl, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    Authority(folder / "authority").issue(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(files: Path) -> AsyncIterator[Stack]:
    settings = ["engine.dtype=float32", *tls_settings(tls_config(files)), "proxy.workers=2"]
    async with live_stack(served_folder("llama"), prefill=1, settings=settings) as running:
        yield running


def scheduler(stack: Stack) -> str:
    return f"127.0.0.1:{stack.services['scheduler'].port}"


async def policy(stack: Stack, config: TlsConfig) -> str:
    """What `millrace policy` prints, told of the files by the environment."""
    named = {
        f"MILLRACE_TLS__{name.upper()}": getattr(config, name)
        for name in ("ca_file", "cert_file", "key_file")
    }
    arguments = ("policy", "--scheduler", scheduler(stack))
    _, output = await millrace(*arguments, environment=named, timeout_s=HANG_S)
    return output


async def answers(stack: Stack, seed: int) -> None:
    """A prompt comes back as the oracle has it: by every service, and over KV that travelled."""
    ids = prompt(60, seed)
    async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client:
        assert await greedy_ids(client, ids, 8) == oracle("llama").greedy(ids, 8)


@pytest.mark.slow
async def test_tokens_stream_and_whoever_shows_no_certificate_is_refused(
    stack: Stack, files: Path
) -> None:
    await answers(stack, 1)
    with pytest.raises(SchedulerUnavailable):
        await get_settings(scheduler(stack))
    use_tls(tls_config(files))
    try:
        assert (await get_settings(scheduler(stack)))["policy"] == "millrace"
    finally:
        use_tls(TlsConfig())


@pytest.mark.slow
async def test_what_starts_after_a_renewal_meets_what_started_before(
    stack: Stack, files: Path
) -> None:
    """The files are another CA's now: a prefill instance dies and comes back with those."""
    Authority(files / "another").issue(files)
    assert (await policy(stack, tls_config(files))).startswith("policy")
    service = stack.services["prefill-0"]
    assert service.process is not None
    service.process.kill()
    async with asyncio.timeout(HANG_S):
        while not (service.restarts and service.serving):  # noqa: ASYNC110 - a service has no event
            await asyncio.sleep(0.1)
    await answers(stack, 2)
