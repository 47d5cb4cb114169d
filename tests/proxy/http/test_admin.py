"""/admin/scheduler: its answers, the clients that it accepts, and the errors for others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import httpx
import pytest
import pytest_asyncio

from millrace.core.config import ProxyConfig
from millrace.core.priority import POLICIES
from millrace.proxy.errors import ApiError
from millrace.proxy.http.admin import IMPROVEMENT_RATE, POLICY, RequestAdmin, SchedulerAdmin
from millrace.proxy.request.reading import read_body
from millrace.wire.clients.scheduler_client import explain
from support.gateway import gateway
from support.scheduler_peers import scheduler, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/admin/scheduler"
RATE = "/admin/improvement-rate"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with gateway(tmp_path_factory.mktemp("model")) as running:
        yield running


WEIGHTS = {"classes": {"default": 1.0}, "tenants": {"default": 1.0}}


def check(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """Checks the form of an error for OpenAI's clients; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


async def test_the_policy_is_shown_and_changed(stack):
    shown = {"preemption": "none", "planner": "least_queue", "policies": list(POLICIES)}
    shown["improvement_rate"] = 0.3
    shown["weights"] = WEIGHTS
    assert (await stack.http.get(PATH)).json() == {"policy": "fcfs", **shown}
    changed = await stack.http.put(PATH, json={"policy": "s_edf"})
    assert (changed.status_code, changed.json()) == (200, {"policy": "s_edf", "before": "fcfs"})
    assert (await stack.http.get(PATH)).json() == {"policy": "s_edf", **shown}
    await stack.http.put(PATH, json={"policy": "fcfs"})
    text = (await stack.http.get("/metrics")).text
    assert 'millrace_proxy_http_requests_total{code="200",route="/admin/scheduler"} 4.0' in text


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"policy": ""}, "invalid_value", "policy"),
        ({"policy": "f" * 65}, "invalid_value", "policy"),
        ({"policy": 3}, "invalid_type", "policy"),
        ({}, "missing_required_parameter", "policy"),
        ({"policy": "edf", "planner": "cdsp"}, "unknown_parameter", "planner"),
        ({"weights": {"classes": {"default": 0}}}, "invalid_value", "weights.classes.default"),
        ({"weights": {"classes": {"x": 2}}}, "invalid_value", "weights"),
        ({"policy": "edf", "weights": {"tenants": {"x": 2}}}, "invalid_value", "weights"),
        ({"weights": {"classes": 2}}, "invalid_type", "weights.classes"),
        ({"weights": {"keys": {}}}, "unknown_parameter", "weights.keys"),
        ({"weights": {}}, "missing_required_parameter", "weights"),
        ({"weights": {"tenants": {}}}, "missing_required_parameter", "weights"),
        ([], "invalid_body", None),
    ],
)
async def test_a_wrong_body_is_refused_and_changes_nothing(stack, body, code, param):
    check(await stack.http.put(PATH, json=body), 400, code, param)
    assert stack.fleet.policy == "fcfs"


async def test_weights_are_changed_with_a_policy_or_alone(stack):
    body = {"policy": "edf", "weights": {"tenants": {"default": 2}}}
    changed = (await stack.http.put(PATH, json=body)).json()
    assert changed == {"policy": "edf", "before": "fcfs", "weights": WEIGHTS | body["weights"]}
    body = {"policy": "fcfs", "weights": {"tenants": {"default": 1.0}}}
    await stack.http.put(PATH, json=body)
    body = {"weights": {"classes": {"default": 1.0}}}
    changed = (await stack.http.put(PATH, json=body)).json()
    assert changed == {"policy": "fcfs", "before": "fcfs", "weights": WEIGHTS}


async def test_an_unknown_policy_is_refused_with_those_there_are(stack):
    refused = await stack.http.put(PATH, json={"policy": "sjf"})
    message = check(refused, 400, "invalid_value", "policy")
    names = ", ".join(map(repr, POLICIES))
    assert message == f"Invalid 'policy': must be one of {names}, got 'sjf'."
    assert stack.fleet.policy == "fcfs"


async def test_the_improvement_rate_is_shown_and_changed(stack):
    assert (await stack.http.get(RATE)).json() == {"improvement_rate": 0.3}
    changed = await stack.http.put(RATE, json={"rate": 0})
    assert (changed.status_code, changed.json()) == (200, {"improvement_rate": 0.0, "before": 0.3})
    changed = await stack.http.put(RATE, json={"rates": "0.5:0.3,2:0.4"})
    assert changed.json() == {"improvement_rate": 0.3, "before": 0.0}
    changed = await stack.http.put(RATE, json={"rates": "2:0.4,0.5:0.1,2.0:0.5,0.25:0.3"})
    assert changed.json() == {"improvement_rate": 0.3, "before": 0.3}  # the row of least arrivals


async def test_rows_of_rates_may_come_in_any_order_and_the_last_of_equal_ones_counts():
    body = b'{"rates": "2:0.4,0.5:0.1,2.0:0.5,0.25:0.3"}'
    wanted = {"rates": "0.250000:0.3,0.500000:0.1,2.000000:0.5"}
    assert read_body(IMPROVEMENT_RATE.body, body) == wanted


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"rate": 1.1}, "invalid_value", "rate"),
        ({"rate": "0.1"}, "invalid_type", "rate"),
        ({"rates": "2:0.1,1"}, "invalid_value", "rates"),
        ({"rates": "2:1.5"}, "invalid_value", "rates"),
        ({"rates": ""}, "empty_string", "rates"),
        ({"rate": 0.1, "rates": "1:0.1"}, "missing_required_parameter", "rate"),
        ({}, "missing_required_parameter", "rate"),
        ({"policy": "edf"}, "unknown_parameter", "policy"),
    ],
)
async def test_a_wrong_rate_is_refused_and_changes_nothing(stack, body, code, param):
    check(await stack.http.put(RATE, json=body), 400, code, param)
    assert stack.fleet.improvement_rate == 0.3


async def test_other_methods_and_content_types(stack):
    check(await stack.http.post(PATH, json={"policy": "edf"}), 405, "method_not_allowed")
    sent = await stack.http.put(PATH, content=b"policy=edf")
    check(sent, 415, "unsupported_media_type", "Content-Type")


@pytest.mark.parametrize("relayed", ["x-forwarded-for", "forwarded", "origin"])
async def test_without_a_token_who_comes_through_another_is_not_local(stack, relayed):
    for sent in (
        await stack.http.get(PATH, headers={relayed: "http://127.0.0.1"}),
        await stack.http.put(PATH, json={"policy": "edf"}, headers={relayed: "127.0.0.1"}),
        await stack.http.put(RATE, json={"rate": 0.1}, headers={relayed: "127.0.0.1"}),
    ):
        assert "proxy.admin_token" in check(sent, 403, "not_local")
    assert stack.fleet.policy == "fcfs"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", 200),
        ("localhost:8080", "http://localhost:8080", 200),
        ("127.0.0.1:8080", "http://127.0.0.1:9090", 403),  # a page of another server
        ("127.0.0.1:8080", "http://localhost:8080", 403),
        ("evil.example:8080", "http://evil.example:8080", 403),  # a name that leads here
        ("evil.example:8080", None, 403),  # as a browser reads from a page's own server
        ("[::1]:8080", None, 200),
        ("localhost", None, 200),
        ("[", None, 403),
        ("127.0.0.1:8080", "https://127.0.0.1:8080", 403),
        ("127.0.0.1:8080", "null", 403),
    ],
)
async def test_without_a_token_the_proxys_own_page_is_let_in(stack, host, origin, status):
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    sent = await stack.http.put(RATE, json={"rate": 0.3}, headers=headers)
    assert sent.status_code == status


@pytest.mark.parametrize(
    ("client", "local"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.8.8", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.7", 1), False),
        (("::ffff:10.0.0.7", 1), False),
        (("fe80::1", 1), False),
        (("somebody", 1), False),
        (None, False),
    ],
)
async def test_without_a_token_only_this_machine_is_let_in(stack, client, local):
    admin = SchedulerAdmin(ProxyConfig(), lambda _: stack.fleet.scheduler_address, POLICY)
    scope = {"type": "http", "method": "GET", "headers": [], "client": client}
    scope["query_string"] = b""
    sent = []

    async def send(message):
        sent.append(message)

    if local:
        assert await admin.answer(scope, asyncio.Event().wait, send) == 200
        assert b"fcfs" in sent[1]["body"]
        return
    with pytest.raises(ApiError) as caught:
        await admin.answer(scope, asyncio.Event().wait, send)
    assert (caught.value.status, caught.value.code, sent) == (403, "not_local", [])


async def test_a_token_is_needed_where_one_is_set_and_serves_from_anywhere(tmp_path):
    async with gateway(tmp_path, "proxy.admin_token=gehe\u00efm") as guarded:
        for given in ({}, {"authorization": "Bearer no"}, {"authorization": "gehe\u00efm"}):
            headers = {k: v.encode() for k, v in given.items()}
            sent = await guarded.http.put(PATH, json={"policy": "edf"}, headers=headers)
            assert "proxy.admin_token" in check(sent, 401, "bad_token")
            assert sent.headers["www-authenticate"] == "Bearer"
        headers = {
            "authorization": "Bearer gehe\u00efm".encode(),
            "x-forwarded-for": b"10.0.0.7",
        }
        sent = await guarded.http.put(PATH, json={"policy": "edf"}, headers=headers)
        assert (sent.status_code, guarded.fleet.policy) == (200, "edf")


async def test_without_a_scheduler_it_says_so(tmp_path):
    async with gateway(tmp_path) as alone:
        await alone.fleet.stop_scheduler()
        for sent in (
            await alone.http.get(PATH),
            await alone.http.put(PATH, json={"policy": "edf"}),
        ):
            assert "no scheduler at 127.0.0.1:" in check(sent, 503, "unavailable")
            assert sent.headers["retry-after"] == "1"


async def test_a_request_is_explained_as_the_scheduler_does():
    async with scheduler() as net:
        for name in ("p0", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await proxy.next("placed")
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "headers": [], "client": ("127.0.0.1", 9)}
        scope["path_params"] = {"id": "r"}
        admin = RequestAdmin(ProxyConfig(), lambda: [net.address])
        assert await admin.answer(scope, asyncio.Event().wait, send) == 200
        found = json.loads(sent[-1]["body"])
        expected = asdict(await explain(net.address, "r"))
        assert found.keys() == expected.keys()
        for name in ("request_id", "state", "policy", "waits_for"):
            assert found[name] == expected[name]


async def test_a_request_that_nobody_knows_is_not_found(stack):
    unknown = await stack.http.get("/admin/requests/nobody")
    assert "nobody" in check(unknown, 404, "unknown_request")


async def test_a_request_is_explained_to_administrators_only(tmp_path):
    async with gateway(tmp_path, "proxy.admin_token=s3cret") as guarded:
        refused = await guarded.http.get("/admin/requests/r")
        check(refused, 401, "bad_token")
