"""One proxy over HTTP in front of two scripted fleets, whose models have other vocabularies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.config import Config, load_config
from millrace.core.config.models import Canary, ModelConfig, models_file
from millrace.proxy.service import Proxy, listen
from support.deadlines import HANG_S, eventually
from support.gateway import Fleet, Script

#: Name, vocabulary and context of each.
SMALL, LARGE = ("small", 300, 512), ("large", 400, 2048)


@dataclass
class Two:
    """A running proxy, its fleets by model, and the file of its models."""

    proxy: Proxy
    fleets: dict[str, Fleet]
    http: httpx.AsyncClient
    listed: dict[str, ModelConfig]
    path: Path

    def write(self, *models: ModelConfig) -> None:
        self.path.write_text(models_file(models))

    async def exchange(self, *models: ModelConfig) -> None:
        """Makes these the models of the proxy."""
        self.write(*models)
        await self.proxy.models.look()

    async def ready(self, *names: str) -> None:
        for name in names:
            await eventually(lambda name=name: self.proxy.models.is_ready(name))

    def canary(self, percent: float) -> ModelConfig:
        """The small model, of whose requests the large model answers a share."""
        return replace(self.listed["small"], canary=Canary(model="large", percent=percent))

    async def idle(self) -> None:
        """Returns when no model has a request any more; or fails."""
        await eventually(lambda: self.proxy.models.inflight == 0)
        for model in self.proxy.models.all:
            model.gateway.check_integrity()


@asynccontextmanager
async def two_models(
    folder: Path, *settings: str, config: Config | None = None, names: Sequence[str] = ()
) -> AsyncIterator[Two]:
    """`names`: the models that the proxy begins with; none: both."""
    fleets: dict[str, Fleet] = {}
    listed: dict[str, ModelConfig] = {}
    for name, vocabulary, context in (SMALL, LARGE):
        home = write_stub_model(folder / name, vocab_size=vocabulary, context_tokens=context)
        fleet = fleets[name] = Fleet(Tokenizer.from_file(str(home / "tokenizer.json")))
        fleet.script = Script(reply=f"I am {name}")
        await fleet.start()
        listed[name] = ModelConfig(
            name=name, model=str(home), scheduler=fleet.scheduler_address, aliases=(f"my-{name}",)
        )
    path = folder / "models.toml"
    path.write_text(models_file(listed[name] for name in names or listed))
    tree = config or load_config(overrides=settings)
    proxy = Proxy(replace(tree, proxy=replace(tree.proxy, models_file=str(path))))
    await proxy.start(listen("127.0.0.1", 0))
    url = f"http://127.0.0.1:{proxy.port}"
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=HANG_S, trust_env=False, verify=False
        ) as http:
            two = Two(proxy, fleets, http, listed, path)
            await two.ready(*(names or listed))
            yield two
            await two.idle()
    finally:
        await proxy.stop()
        for fleet in fleets.values():
            await fleet.stop()
