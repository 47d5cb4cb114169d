"""The endpoint of resumed streams: what it refuses, and whose streams it has."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import orjson
import pytest

from millrace.core.config import StoreConfig, TenantConfig, load_config
from support.gateway import Script, gateway
from support.resumable_streams import (
    CHAT,
    COMPLETIONS,
    KINDS,
    MESSAGE,
    MESSAGES,
    REPLY,
    RESUMABLE,
    Decode,
    body_of,
    events_of,
    resumed,
    whole,
)
from support.stores import private_redis


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def test_errors_of_messages_have_their_form(stack):
    Decode(stack, Script(reply=REPLY))
    stream_id, events = await whole(stack, *MESSAGE)
    number, checksum = events[2][0].split("-")
    text = await resumed(stack, stream_id, f"{number}-{int(checksum, 16) ^ 1:08x}")
    kind, data = text.strip().split("\n")
    assert (kind, events_of(text)) == ("event: error", [])
    found = orjson.loads(data.removeprefix("data: "))
    assert found["type"] == "error" and "another one now" in found["error"]["message"]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
async def test_an_id_of_another_stream_is_no_place_to_resume_from(stack, kind):
    Decode(stack, Script(reply=REPLY))
    stream_id, events = await whole(stack, *kind)
    for wrong in ("99-00000000", events[2][0][:-1] + "z", "x"):
        headers = {"last-event-id": wrong}
        response = await stack.http.get(f"/v1/requests/{stream_id}/stream", headers=headers)
        assert "error" in response.text and events_of(response.text) == []
    number = events[2][0].partition("-")[0]
    text = await resumed(stack, stream_id, f"{number}-{int(events[2][0][-8:], 16) ^ 1:08x}")
    assert events_of(text) == [] and '"diverged"' in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": False}, "stream"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_what_a_journal_lacks_is_refused_by_name(stack, fields, param):
    body = body_of({"messages": MESSAGES, **fields})
    response = await stack.http.post(CHAT, json=body, headers=RESUMABLE)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_other_refusals(stack, tmp_path):
    for fields, headers, param in (
        ({"prompt": ["a", "b"]}, RESUMABLE, "prompt"),
        ({"prompt": "a", "echo": True}, RESUMABLE, "echo"),
        ({"prompt": "a"}, {**RESUMABLE, "x-millrace-trace": "1"}, "x-millrace-trace"),
        ({"prompt": "a"}, {"x-millrace-resumable": "yes"}, "x-millrace-resumable"),
    ):
        response = await stack.http.post(COMPLETIONS, json=body_of(fields), headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    async with gateway(tmp_path / "off", "proxy.resume_grace_s=0") as off:
        response = await off.http.post(
            COMPLETIONS, json=body_of({"prompt": "a"}), headers=RESUMABLE
        )
        assert response.status_code == 400


async def test_streams_without_the_header_have_no_ids_and_cannot_be_resumed(stack):
    response = await stack.http.post(CHAT, json=body_of({"messages": MESSAGES}))
    assert "id: " not in response.text.replace('"id"', "")
    stream_id = response.headers["x-request-id"]
    response = await stack.http.get(f"/v1/requests/{stream_id}/stream")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_not_found")


async def test_tenants_resume_their_own_streams_only(tmp_path):
    tenants = {
        name: TenantConfig(key_sha256=(sha256(name.encode()).hexdigest(),))
        for name in ("ann", "bob")
    }
    async with private_redis() as url:
        config = replace(load_config(), tenants=tenants, store=StoreConfig(url=url))
        async with gateway(tmp_path, config=config) as stack:
            Decode(stack, Script(reply=REPLY))
            ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
            stream_id, _ = await whole(stack, *KINDS[0], **ann)
            for who, status in ((ann, 200), (bob, 404)):
                path = f"/v1/requests/{stream_id}/stream"
                assert (await stack.http.get(path, headers=who)).status_code == status
