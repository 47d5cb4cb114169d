"""The file of keys: read at the start, read again when it changes, kept when it is wrong."""

from __future__ import annotations

from hashlib import sha256

import pytest

from millrace.core.config import load_config
from millrace.core.errors import ConfigError
from millrace.proxy.tenancy.key_ring import LOOK_S, KeyRing
from support.tenants import config_with, digest, key_toml, tenant_toml


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tenant_of(ring: KeyRing, key: str) -> str | None:
    found = ring.find(sha256(key.encode()).digest())
    return None if found is None else found.tenant


def ring_of(path, clock: Clock, tables: str = "", folder=None) -> KeyRing:
    settings = folder or path.parent / "settings"
    config = config_with(settings, tables, f"auth.keys_file={path}")
    return KeyRing(config, clock=clock)


def test_a_changed_file_is_in_use_soon_and_a_removed_key_is_unknown(tmp_path, clock):
    path = tmp_path / "keys.toml"
    path.write_text(tenant_toml("acme", "sk-1"))
    ring = ring_of(path, clock)
    assert tenant_of(ring, "sk-1") == "acme"
    path.write_text(tenant_toml("acme", "sk-2") + tenant_toml("beta", "sk-3"))
    assert tenant_of(ring, "sk-1") == "acme"  # the file is looked at once a second
    clock.now_s += LOOK_S
    assert [tenant_of(ring, key) for key in ("sk-1", "sk-2", "sk-3")] == [None, "acme", "beta"]


def test_a_secret_that_is_replaced_as_a_whole_is_noticed(tmp_path, clock):
    """As Kubernetes does it: the path is a link whose target changes."""
    for name, key in (("one", "sk-1"), ("two", "sk-2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.toml").write_text(tenant_toml("acme", key))
    link = tmp_path / "data"
    link.symlink_to("one")
    ring = ring_of(link / "keys.toml", clock, folder=tmp_path / "settings")
    assert tenant_of(ring, "sk-1") == "acme"
    link.unlink()
    link.symlink_to("two")
    clock.now_s += LOOK_S
    assert [tenant_of(ring, key) for key in ("sk-1", "sk-2")] == [None, "acme"]


@pytest.mark.parametrize("text", ["[tenants", "[tenants.acme]\nkey_sha256 = 'sk-1'\n", "[x]\n"])
def test_a_wrong_file_changes_nothing_until_it_is_right_again(tmp_path, clock, caplog, text):
    path = tmp_path / "keys.toml"
    path.write_text(tenant_toml("acme", "sk-1"))
    ring = ring_of(path, clock)
    path.write_text(text)
    for _ in range(3):
        clock.now_s += LOOK_S
        assert tenant_of(ring, "sk-1") == "acme"
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "auth.keys_file" in record.getMessage()
    path.unlink()
    clock.now_s += LOOK_S
    assert tenant_of(ring, "sk-1") == "acme"
    path.write_text(tenant_toml("acme", "sk-2"))
    clock.now_s += LOOK_S
    assert [tenant_of(ring, key) for key in ("sk-1", "sk-2")] == [None, "acme"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[tenants.acme]\nweight = 2\n", "tenants.acme.weight is for the scheduler"),
        ("tenants = 3\n", "tenants is 3; it must be a table"),
        ("[proxy]\nport = 1\n", "unknown section 'proxy'; there is tenants"),
        (tenant_toml("acme", "a", slo_classes=["x"]), "tenants.acme.slo_classes has 'x'"),
        (tenant_toml("beta", "sk-0"), "tenants.beta has the key"),
    ],
)
def test_a_wrong_file_stops_the_start(tmp_path, clock, text, message):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"auth\.keys_file") as caught:
        ring_of(path, clock, tenant_toml("acme", "sk-0"))
    assert message in str(caught.value)


def test_the_file_adds_keys_to_tenants_of_the_settings_and_may_replace_their_access(
    tmp_path, clock
):
    path = tmp_path / "keys.toml"
    tables = tenant_toml("acme", "sk-0", weight=2, concurrency=3) + tenant_toml("b", concurrency=4)
    path.write_text(tenant_toml("acme", "sk-1") + tenant_toml("b", "sk-2", concurrency=5))
    ring = ring_of(path, clock, tables)
    assert [tenant_of(ring, key) for key in ("sk-0", "sk-1", "sk-2")] == ["acme", "acme", "b"]
    tenants = ring.tenants
    assert (tenants["acme"].weight, tenants["acme"].access.limits.concurrency) == (2.0, 3)
    assert tenants["b"].access.limits.concurrency == 5


def test_a_key_of_its_own_narrows_its_tenant(tmp_path, clock):
    tables = tenant_toml("acme", "sk-0", models=["a", "b"], requests_per_minute=60)
    tables += key_toml("acme", "sk-1", name="ci", models=["b"], requests_per_minute=6)
    tables += key_toml("acme", "sk-2")
    ring = KeyRing(config_with(tmp_path, tables), clock=clock)
    shared, own, plain = (ring.find(bytes.fromhex(digest(k))) for k in ("sk-0", "sk-1", "sk-2"))
    assert shared is not None and own is not None and plain is not None
    assert (shared.models, own.models, plain.models) == (("a", "b"), ("b",), ("a", "b"))
    limits = [[one.limits.requests_per_minute for one in c.accounts] for c in (shared, own, plain)]
    assert limits == [[60], [60, 6], [60]]
    assert own.accounts[1].name == f"key-{digest('sk-1')[:16]}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": ["c"]}, "tenants.acme.keys[0].models has 'c'; there are a, b"),
        ({"requests_per_minute": -1}, "tenants.acme.keys[0].requests_per_minute is -1"),
        ({"requests_per_minute": 1.5}, "it must be a whole number from 0 (no limit)"),
        ({"weight": 2}, "unknown field tenants.acme.keys[0].weight"),
        ({"name": 3}, "tenants.acme.keys[0].name is 3; it must be a text"),
        ({"models": 3}, "tenants.acme.keys[0].models is 3; it must be a name"),
    ],
)
def test_a_wrong_key_is_explained(tmp_path, fields, message):
    tables = tenant_toml("acme", "sk-0", models=["a", "b"]) + key_toml("acme", "sk-1", **fields)
    with pytest.raises(ConfigError) as caught:
        config_with(tmp_path, tables)
    assert message in str(caught.value)


def test_without_keys_and_limits_there_is_nothing_to_look_up(tmp_path):
    assert KeyRing(load_config()).empty
    assert not KeyRing(config_with(tmp_path, tenant_toml("default", concurrency=1))).empty
