"""Why a request was slow, asked of the gateway by its own client."""

from __future__ import annotations

import httpx

from millrace.shipped import SHIPPED_MODEL
from support.deadlines import HANG_S
from support.live_stack import complete, live_stack


async def test_a_client_learns_where_the_time_of_its_request_went():
    async with (
        live_stack(SHIPPED_MODEL, prefill=1) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        body = {"prompt": "word " * 300, "max_tokens": 4, "ignore_eos": True}
        answer = await complete(client, **body)
        sent = await client.get(f"/v1/requests/{answer['id']}/explain")
        found = sent.json()
        assert sent.status_code == 200, found
        assert (found["object"], found["state"]) == ("millrace.explanation", "finished")
        seconds = sum(one["seconds"] for one in found["waited"])
        assert abs(seconds - found["first_token_s"]) < 1e-6
        assert any("prefix cache" in one["what"] for one in found["helps"])
        assert not {"before", "suspended_by", "waits_for"} & found.keys()
        unknown = await client.get("/v1/requests/cmpl-nobody/explain")
        assert unknown.json()["error"]["code"] == "request_not_found"
