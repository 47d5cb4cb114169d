"""GET /admin/tenants: what tenants may use, and what is left."""

from __future__ import annotations

import asyncio

import pytest

from support.deadlines import HANG_S
from support.gateway import MODEL, gateway
from support.stores import private_redis
from support.tenants import bearer, config_with, digest, key_toml, tenant_toml

PROMPT = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 3}


async def test_it_shows_access_limits_and_what_they_leave(tmp_path):
    tables = tenant_toml("acme", "sk-acme", weight=2.5, models=[MODEL, "b"], tokens_per_day=1000)
    tables += key_toml("acme", "sk-ci", name="ci", models=[MODEL], requests_per_minute=60)
    config = config_with(tmp_path / "settings", tables + tenant_toml("beta"))
    async with gateway(tmp_path / "model", config=config) as stack:
        stack.fleet.script.token_ids, stack.fleet.script.finish = [5] * 3, "length"
        for key in ("sk-acme", "sk-ci"):
            sent = await stack.http.post("/v1/completions", json=PROMPT, headers=bearer(key))
            assert sent.status_code == 200
        found = (await stack.http.get("/admin/tenants")).json()["tenants"]
    acme, beta = found
    assert (acme["name"], acme["weight"], acme["models"]) == ("acme", 2.5, [MODEL, "b"])
    assert acme["limits"] == {"tokens_per_day": 1000}
    [left] = acme["left"]
    assert (left["meter"], left["used"], left["left"]) == ("tokens_per_day", 46, 954)
    assert 0 < left["reset_s"] <= 86_400
    plain, own = acme["keys"]
    assert (plain["sha256"], plain["left"]) == (digest("sk-acme")[:16], [])
    assert (own["name"], own["models"], own["limits"]) == (
        "ci",
        [MODEL],
        {"requests_per_minute": 60},
    )
    assert own["left"][0]["used"] == 1
    assert (beta["keys"], beta["left"], beta["limits"]) == ([], [], {})


async def test_it_has_the_guard_of_admin(tmp_path):
    async with gateway(tmp_path, "proxy.admin_token=s3cret", "auth.require_key=on") as stack:
        assert (await stack.http.get("/admin/tenants")).status_code == 401
        sent = await stack.http.get("/admin/tenants", headers=bearer("s3cret"))
        assert sent.json() == {"tenants": []}
        refused = await stack.http.put("/admin/tenants/acme", json={})
        assert refused.status_code == 401


async def status(stack, key: str) -> int:
    return (await stack.http.get("/v1/models", headers=bearer(key))).status_code


async def until_known(stack, key: str) -> None:
    """Returns once the proxy has read the tenants of the store again."""
    async with asyncio.timeout(HANG_S):
        while await status(stack, key) != 200:  # noqa: ASYNC110 - the proxy polls, and tells nobody
            await asyncio.sleep(0.05)


async def test_a_tenant_of_the_store_is_in_use_at_once_here_and_soon_at_the_other_proxy(tmp_path):
    async with private_redis() as url:
        settings = (f"store.url={url}", "auth.require_key=on", "auth.stored_keys=on")
        async with gateway(tmp_path / "a", *settings) as one:
            table = {"key_sha256": [digest("sk-new")], "requests_per_minute": 1}
            sent = await one.http.put("/admin/tenants/acme", json=table)
            assert (sent.status_code, sent.json()) == (200, {"name": "acme", "stored": True})
            assert await status(one, "sk-new") == 200
            async with gateway(tmp_path / "b", *settings) as other:
                assert await status(other, "sk-new") == 200  # read at its start
                for stack, code in ((one, 200), (other, 429)):
                    answered = await stack.http.post(
                        "/v1/completions", json=PROMPT, headers=bearer("sk-new")
                    )
                    assert answered.status_code == code
                await one.http.put("/admin/tenants/acme", json={"key_sha256": [digest("sk-next")]})
                assert (await status(one, "sk-new"), await status(one, "sk-next")) == (401, 200)
                await until_known(other, "sk-next")
                assert await status(other, "sk-new") == 401
                [shown] = (await other.http.get("/admin/tenants")).json()["tenants"]
                assert (shown["name"], shown["stored"]) == ("acme", True)
                gone = await other.http.delete("/admin/tenants/acme")
                assert gone.json() == {"name": "acme", "stored": False}
                assert await status(other, "sk-next") == 401
                again = await other.http.delete("/admin/tenants/acme")
                assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_tenant")


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("acme", {"key_sha256": ["sk-1"]}, "tenants.acme.key_sha256 is no SHA-256 digest"),
        ("acme", {"key_sha256": [digest("sk-0")]}, "a key must belong to one tenant"),
        (
            "acme",
            {"slo_classes": ["x"]},
            "tenants.acme.slo_classes has 'x'; there are batch, default",
        ),
        ("acme", {"weight": 2}, "weight"),
        ("acme", {"requests_per_minute": -1}, "requests_per_minute"),
        ("acme", {"keys": [{"sha256": "x"}]}, "tenants.acme.keys[0].sha256 is no SHA-256"),
        ("-a", {}, "Invalid 'name'"),
    ],
)
async def test_a_wrong_table_is_refused_and_changes_nothing(tmp_path, name, table, message):
    tables = tenant_toml("other", "sk-0")
    config = config_with(tmp_path / "settings", tables, "auth.stored_keys=on")
    async with gateway(tmp_path / "model", config=config) as stack:
        sent = await stack.http.put(f"/admin/tenants/{name}", json=table)
        assert sent.status_code == 400
        assert message in sent.json()["error"]["message"]
        assert "sk-1" not in sent.text
        found = (await stack.http.get("/admin/tenants")).json()["tenants"]
        assert [tenant["name"] for tenant in found] == ["other"]


async def test_without_the_setting_nothing_is_written(tmp_path):
    async with gateway(tmp_path) as stack:
        for sent in (
            await stack.http.put("/admin/tenants/acme", json={}),
            await stack.http.delete("/admin/tenants/acme"),
        ):
            assert (sent.status_code, sent.json()["error"]["code"]) == (403, "off")
