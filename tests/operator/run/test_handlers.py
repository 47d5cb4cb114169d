"""The objects that a change concerns, and kopf's settings."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.config import incluster_config

from millrace_operator.run import handlers
from millrace_operator.run.handlers import Touches, make_registry, make_settings
from millrace_operator.run.kube import load_configuration
from millrace_operator.run.queue import Key
from support.deadlines import HANG_S

SERVICE = Key("ModelService", "ns", "chat")
PREFILL = Key("PrefillGroup", "ns", "chat-prefill")
DECODE = Key("DecodePool", "ns", "chat-decode")


class Seen:
    """Returns the touches since the last call."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self.touches = Touches(self._keys.append)

    def __call__(self) -> set[Key]:
        found = set(self._keys)
        self._keys.clear()
        return found


@pytest.fixture
def seen() -> Seen:
    """With a service and two pools that exist already."""
    seen = Seen()
    seen.touches.service(None, obj("chat"))
    seen.touches.pool("PrefillGroup", None, obj("chat-prefill"))
    seen.touches.pool("DecodePool", None, obj("chat-decode"))
    assert seen() == {SERVICE, PREFILL, DECODE}
    return seen


def obj(name: str, generation: int = 1, **status: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": name, "generation": generation}
    return {"metadata": meta, "spec": {"serviceRef": {"name": "chat"}}, "status": status}


def test_what_is_asked_of_a_service_concerns_its_pools(seen: Seen):
    seen.touches.service("MODIFIED", obj("chat", 2))
    assert seen() == {SERVICE, PREFILL, DECODE}
    seen.touches.service("MODIFIED", obj("chat", 2, phase="Ready"))
    assert seen() == set()  # only the operator writes a status


def test_a_services_spec_concerns_the_gateways_that_list_it(seen: Seen):
    front = obj("front") | {"spec": {"gateway": {"models": [{"service": "chat"}]}}}
    key = Key("ModelService", "ns", "front")
    seen.touches.service("ADDED", front)
    assert seen() == {key}
    seen.touches.service("MODIFIED", obj("chat", 2))
    assert seen() == {SERVICE, PREFILL, DECODE, key}
    seen.touches.service("MODIFIED", obj("front", 2))  # it lists no service any more
    assert seen() == {key}
    seen.touches.service("DELETED", obj("chat", 2))
    assert seen() == {SERVICE, PREFILL, DECODE}


def test_a_pools_state_concerns_the_service_and_its_siblings(seen: Seen):
    pool = obj("chat-prefill", readyReplicas=1)
    seen.touches.pool("PrefillGroup", "MODIFIED", pool)
    assert seen() == {SERVICE, DECODE}
    seen.touches.pool("PrefillGroup", "MODIFIED", obj("chat-prefill", 2, readyReplicas=1))
    assert seen() == {SERVICE, PREFILL, DECODE}


def test_metrics_concern_nobody(seen: Seen):
    metrics = [{"name": "kvUtilization", "value": "0.5"}]
    seen.touches.pool("DecodePool", "MODIFIED", obj("chat-decode", metrics=metrics))
    assert seen() == set()
    conditions = [{"type": "Available", "status": "True", "message": "now"}]
    seen.touches.pool("DecodePool", "MODIFIED", obj("chat-decode", conditions=conditions))
    assert seen() == {SERVICE, PREFILL}
    conditions = [{"type": "Available", "status": "True", "message": "still"}]
    seen.touches.pool("DecodePool", "MODIFIED", obj("chat-decode", conditions=conditions))
    assert seen() == set()


def test_a_deletion_concerns_all_and_is_forgotten(seen: Seen):
    seen.touches.pool("DecodePool", "DELETED", obj("chat-decode"))
    assert seen() == {SERVICE, PREFILL, DECODE}
    seen.touches.service("MODIFIED", obj("chat", 2))
    assert seen() == {SERVICE, PREFILL}
    seen.touches.pool("DecodePool", "ADDED", obj("chat-decode"))
    assert seen() == {SERVICE, PREFILL, DECODE}
    seen.touches.service("DELETED", obj("chat", 2))
    assert SERVICE in seen()


@pytest.mark.parametrize(
    ("labels", "touched"),
    [
        ({"app.kubernetes.io/component": "prefill", "millrace.dev/pool": "chat-prefill"}, PREFILL),
        ({"app.kubernetes.io/component": "decode", "millrace.dev/pool": "chat-decode"}, DECODE),
        ({"app.kubernetes.io/component": "proxy"}, SERVICE),
        ({"app.kubernetes.io/component": "kvp", "millrace.dev/pool": "p"}, ("KVPWorkerPool", "p")),
    ],
)
def test_children_concern_whose_labels_they_bear(labels: dict[str, str], touched: Any):
    seen = Seen()
    bears = {"millrace.dev/service": "chat", **labels}
    seen.touches.child({"metadata": {"namespace": "ns", "labels": bears}})
    (key,) = seen()
    assert key == touched or (key.kind, key.name) == touched
    seen.touches.child({"metadata": {"namespace": "ns", "name": "a stranger"}})
    assert seen() == set()


def test_kopf_is_only_asked_to_watch():
    """Handlers of changes, daemons and timers would write annotations and finalizers."""
    registry = make_registry(Touches(lambda key: None), load_configuration)
    watched = {str(handler.selector) for handler in registry._watching.get_all_handlers()}
    assert len(watched) == 7
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert list(others.get_all_handlers()) == []
    settings = make_settings()
    assert not settings.posting.enabled and settings.scanning.disabled
    assert isinstance(settings.watching.server_timeout, int)  # a whole number


async def test_kopf_logs_in_as_the_client_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Logs in with a pod's service account, and again after its token was renewed."""
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    ca.write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(ca))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    registry = make_registry(Touches(lambda key: None), load_configuration)
    (login,) = registry._activities.get_all_handlers()
    for secret in ("first", "second"):
        token.write_text(secret)
        found = await login.fn()
        assert (found.server, found.ca_path) == ("https://10.0.0.1:443", str(ca))
        assert found.as_http_headers() == {"Authorization": f"Bearer {secret}"}


def test_the_operator_needs_no_torch():
    program = (
        "import sys, millrace_operator.environment, millrace_operator.run.operator; "
        "sys.exit(next((f'{m} was imported' for m in ('torch', 'numpy', 'nixl', 'redis') "
        "if m in sys.modules), 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_task_that_can_not_be_cancelled_keeps_no_thread(monkeypatch):
    """So do kopf's watches while no API server answers."""
    monkeypatch.setattr(handlers, "STOP_S", 0.01)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def work() -> None:
        running.append(asyncio.create_task(stubborn()))

    running: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=lambda: handlers.run_alone(work()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert not running[0].done()
