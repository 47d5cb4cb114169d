"""`millrace chat` with a gateway that requires keys."""

from __future__ import annotations

import pytest

from millrace.cli.commands.chat import GatewayError, converse
from support.gateway import gateway
from support.tenants import config_with, tenant_toml


async def say(url: str, api_key: str = "") -> None:
    await converse(
        url, message="hi", system="", max_tokens=9, temperature=0.0, trace=False, api_key=api_key
    )


async def test_it_shows_its_key_and_says_what_the_gateway_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tables = tenant_toml("acme", "sk-acme") + tenant_toml("none", "sk-none", models=["another"])
    config = config_with(tmp_path / "settings", tables, "auth.require_key=on")
    async with gateway(tmp_path / "model", config=config) as stack:
        await say(stack.url, "sk-acme")
        assert "Hello there" in capsys.readouterr().out
        with pytest.raises(GatewayError, match="You didn't provide an API key"):
            await say(stack.url)
        with pytest.raises(GatewayError, match="Incorrect API key provided"):
            await say(stack.url, "sk-wrong")
        with pytest.raises(GatewayError, match="may use no model"):
            await say(stack.url, "sk-none")
