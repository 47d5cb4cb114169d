"""GET /admin/tenants: what tenants may use, and what is left."""

from __future__ import annotations

from support.gateway import MODEL, gateway
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
