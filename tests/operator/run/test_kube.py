"""The calls to the API server: their requests, and the handling of the answers."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp.web
import pytest
import yaml
from kmock import Request
from kubernetes.aio import client

from millrace.core.errors import MillraceError
from millrace.wire.tls import SERVER_NAME
from millrace_operator.run import crds, kube
from millrace_operator.run.kube import Kube, KubeError, KubeRefused, load_configuration
from millrace_operator.schema import API_VERSION
from support.certificates import Authority, needs_openssl
from support.kube_emulator import Fault, KubeEmulator, configuration_of, kube_emulator

SETTINGS = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "c", "namespace": "default", "labels": {"app": "x"}},
    "data": {"a": "1", "b": "2"},
}


#: A plugin for credentials: every run makes a token that is longer by a character.
PLUGIN = """
import json, pathlib
runs = pathlib.Path({runs!r})
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
status = {{"token": runs.read_text()}}
if {expires!r}:
    status["expirationTimestamp"] = {expires!r}
version = "client.authentication.k8s.io/v1"
print(json.dumps({{"apiVersion": version, "kind": "ExecCredential", "status": status}}))
"""


@pytest.fixture
async def cluster() -> AsyncIterator[KubeEmulator]:
    async with kube_emulator() as emulator:
        yield emulator


@pytest.fixture
async def calls(cluster: KubeEmulator) -> AsyncIterator[Kube]:
    client = Kube(configuration_of(cluster), connections=2)
    yield client
    await client.close()


def without(manifest: dict[str, object], key: str) -> dict[str, object]:
    data = {name: value for name, value in manifest["data"].items() if name != key}
    return {**manifest, "data": data}


async def test_apply_makes_changes_and_takes_away(cluster: KubeEmulator, calls: Kube):
    assert await calls.get("ConfigMap", "default", "c") is None
    made = await calls.apply(SETTINGS)
    assert made["data"] == {"a": "1", "b": "2"}
    await cluster.edit("ConfigMap", "c", lambda obj: obj["data"].update(theirs="3"))
    assert (await calls.apply(without(SETTINGS, "b")))["data"] == {"a": "1", "theirs": "3"}
    assert {write[2] for write in cluster.writes} == {"millrace-operator"}


async def test_lists_come_in_pages_and_say_what_they_hold(
    cluster: KubeEmulator, calls: Kube, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kube, "PAGE", 2)
    for number in range(5):
        labels = {"odd": "yes"} if number % 2 else {}
        meta = {"name": f"c{number}", "namespace": "default", "labels": labels}
        await cluster.make({**SETTINGS, "metadata": meta})
    found = await calls.list("ConfigMap", "default")
    assert [obj["metadata"]["name"] for obj in found] == ["c0", "c1", "c2", "c3", "c4"]
    assert {(obj["apiVersion"], obj["kind"]) for obj in found} == {("v1", "ConfigMap")}
    found = await calls.list("ConfigMap", "default", "odd=yes")
    assert [obj["metadata"]["name"] for obj in found] == ["c1", "c3"]


async def test_a_delete_means_that_very_object(cluster: KubeEmulator, calls: Kube):
    made = await calls.apply(SETTINGS)
    with pytest.raises(KubeError) as error:
        await calls.delete("ConfigMap", "default", "c", uid="another")
    assert error.value.status == 409 and cluster.find("ConfigMap", "c")
    await calls.delete("ConfigMap", "default", "c", uid=made["metadata"]["uid"])
    await calls.delete("ConfigMap", "default", "c")  # gone is fine
    assert cluster.find("ConfigMap", "c") is None


async def test_a_replica_count_is_the_autoscalers(cluster: KubeEmulator, calls: Kube):
    pool = {"spec": {"serviceRef": {"name": "chat"}}, "metadata": {"name": "p"}}
    await cluster.make({"apiVersion": API_VERSION, "kind": "DecodePool", **pool})
    await calls.scale("DecodePool", "default", "p", 3)
    assert cluster.find("DecodePool", "p")["spec"]["replicas"] == 3
    assert cluster.writes[-1][2] == "millrace-autoscaler"
    await calls.scale("DecodePool", "default", "gone", 3)


async def test_a_status_goes_to_the_object_it_was_made_for(cluster: KubeEmulator, calls: Kube):
    pool = {"spec": {"serviceRef": {"name": "chat"}}, "metadata": {"name": "p"}}
    made = await cluster.make({"apiVersion": API_VERSION, "kind": "DecodePool", **pool})
    await calls.patch_status(made, {"replicas": 1, "revision": "r"})
    await calls.patch_status(made, {"replicas": 2})
    assert cluster.find("DecodePool", "p")["status"] == {"replicas": 2}
    await cluster.remove("DecodePool", "p")
    await calls.patch_status(made, {"replicas": 3})  # gone: the result has no reader
    await cluster.make({"apiVersion": API_VERSION, "kind": "DecodePool", **pool})
    with pytest.raises(KubeError):
        await calls.patch_status(made, {"replicas": 3})


@pytest.mark.parametrize("status", [401, 409, 429, 500, 503])
async def test_what_may_pass_is_an_error(cluster: KubeEmulator, calls: Kube, status: int):
    cluster.faults.append(Fault(status, headers={"Retry-After": "7"}))
    with pytest.raises(KubeError, match=f"PATCH .*/configmaps/c: injected {status}") as error:
        await calls.apply(SETTINGS)
    assert (error.value.status, error.value.retry_after_s) == (status, 7.0)


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_what_will_not_pass_is_a_refusal(cluster: KubeEmulator, calls: Kube, status: int):
    cluster.faults.append(Fault(status))
    with pytest.raises(KubeRefused, match=f"injected {status}") as error:
        await calls.apply(SETTINGS)
    assert error.value.status == status


async def test_no_answer_is_an_error():
    heard = []
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    calls = Kube(configuration, on_call=lambda verb, status: heard.append((verb, status)))
    with pytest.raises(KubeError, match="no answer") as error:
        await calls.get("Pod", "default", "x")
    assert (error.value.status, heard) == (0, [("GET", 0)])
    await calls.close()


async def test_a_slow_answer_is_no_answer(cluster: KubeEmulator):
    answered = asyncio.Event()
    cluster.before = lambda request: answered.wait()
    calls = Kube(configuration_of(cluster), timeout_s=0.05)
    with pytest.raises(KubeError, match="no answer") as error:
        await calls.get("ConfigMap", "default", "c")
    assert error.value.status == 0
    answered.set()
    await calls.close()


async def test_a_started_write_ends_before_the_client_closes(cluster: KubeEmulator):
    """Another operator may lead once this client is closed."""
    arrived, answered = asyncio.Event(), asyncio.Event()

    async def before(request: Request) -> None:
        arrived.set()
        await answered.wait()

    cluster.before = before
    calls = Kube(configuration_of(cluster), connections=1)
    first, second = (
        asyncio.create_task(calls.apply({**SETTINGS, "metadata": {"name": n, "namespace": "x"}}))
        for n in "ab"
    )
    await arrived.wait()
    second.cancel()  # it waits for a connection
    first.cancel()
    await asyncio.wait([first, second])
    closing = asyncio.create_task(calls.close())
    await asyncio.sleep(0)
    assert not closing.done()
    answered.set()
    await closing
    assert [write[1].rpartition("/")[2] for write in cluster.writes] == ["a"]


async def test_crds_are_applied_and_waited_for(
    cluster: KubeEmulator, calls: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(crds, "RETRY_S", 0.01)
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    wanted = {**crd, "metadata": {"name": "decodepools.millrace.dev"}, "spec": {"group": "x"}}
    with pytest.raises(MillraceError, match="no CustomResourceDefinition in"):
        crds.read_crds(tmp_path)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(wanted))
    cluster.faults.append(Fault(429))
    await crds.apply_crds(calls, crds.read_crds(tmp_path))
    found = cluster.find("CustomResourceDefinition", "decodepools.millrace.dev", "")
    assert found["spec"] == {"group": "x"}
    await crds.wait_until_served(calls)
    monkeypatch.setattr(crds, "WAIT_S", 0.0)
    cluster.resources.clear()
    with pytest.raises(KubeError, match="does not serve decodepools"):
        await crds.wait_until_served(calls)


@pytest.mark.parametrize(("expires", "tokens"), [("2000-01-01T00:00:00Z", 3), (None, 1)])
async def test_a_plugins_token_is_renewed_when_it_expires(
    tmp_path: Path, expires: str | None, tokens: int
):
    runs, path, plugin = tmp_path / "runs", tmp_path / "config", tmp_path / "plugin.py"
    plugin.write_text(PLUGIN.format(runs=str(runs), expires=expires))
    version = "client.authentication.k8s.io/v1"
    command = {"apiVersion": version, "command": sys.executable, "args": [str(plugin)]}
    given = {
        "clusters": [{"name": "c", "cluster": {"server": "https://c.test"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"exec": command}}],
        "current-context": "c",
    }
    path.write_text(yaml.safe_dump(given))
    configuration = await load_configuration(str(path))
    for _ in range(2):
        token = await configuration.get_api_key_with_prefix("BearerToken")
    assert token == f"Bearer {'x' * tokens}"


async def test_a_kubeconfig_is_read_by_path_and_context(tmp_path: Path):
    path = tmp_path / "config"
    clusters = [{"name": n, "cluster": {"server": f"https://{n}.test"}} for n in ("one", "two")]
    contexts = [{"name": n, "context": {"cluster": n, "user": "u"}} for n in ("one", "two")]
    users = [{"name": "u", "user": {"token": "secret"}}]
    given = {"clusters": clusters, "contexts": contexts, "users": users, "current-context": "one"}
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **given}))
    assert (await load_configuration(str(path))).host == "https://one.test"
    assert (await load_configuration(str(path), "two")).host == "https://two.test"
    with pytest.raises(MillraceError, match="no access to a Kubernetes cluster"):
        await load_configuration(str(tmp_path / "nothing"))


@needs_openssl
@pytest.mark.parametrize("trusted", [True, False])
async def test_both_sides_show_certificates(tmp_path: Path, trusted: bool):
    """A kubeconfig's CA checks the API server, and its client certificate names the operator."""
    names = []

    async def answer(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        certificate = request.get_extra_info("peercert")
        names.append(dict(*certificate["subject"])["commonName"])
        return aiohttp.web.json_response(SETTINGS, headers={"Connection": "close"})

    server = Authority(tmp_path / "ca").issue(tmp_path / "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server.ca_file)
    context.load_cert_chain(server.cert_file, server.key_file)
    context.verify_mode = ssl.CERT_REQUIRED
    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(answer))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    host, port = runner.addresses[0]

    other = Authority(tmp_path / "other").issue(tmp_path / "stranger")
    ca = server.ca_file if trusted else other.ca_file
    api = {"server": f"https://{host}:{port}", "tls-server-name": SERVER_NAME}
    user = {"client-certificate": server.cert_file, "client-key": server.key_file}
    given = {
        "clusters": [{"name": "c", "cluster": {**api, "certificate-authority": ca}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": user}],
        "current-context": "c",
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(given))
    configuration = await load_configuration(str(path))
    configuration.disable_strict_ssl_verification = True  # they have no key identifiers
    calls = Kube(configuration)
    try:
        if trusted:
            assert await calls.get("ConfigMap", "default", "c") == SETTINGS
        else:
            with pytest.raises(KubeError, match=r"no answer.*CERTIFICATE_VERIFY_FAILED"):
                await calls.get("ConfigMap", "default", "c")
    finally:
        await calls.close()
        await runner.cleanup()
    assert names == ["millrace"] * trusted
