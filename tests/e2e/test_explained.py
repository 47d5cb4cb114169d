"""Why a request was slow, asked of the gateway by its own client."""

from __future__ import annotations

from typing import Any

import httpx

from millrace.shipped import SHIPPED_MODEL
from support.deadlines import HANG_S
from support.live_stack import complete, eventually, live_stack


async def test_a_client_learns_where_the_time_of_its_request_went():
    async with (
        live_stack(SHIPPED_MODEL, prefill=1) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        # Long enough that half of it takes far more than a millisecond, on a fast machine, too.
        body = {"prompt": "word " * 3000, "max_tokens": 4, "ignore_eos": True}
        answer = await complete(client, **body)
        found: dict[str, Any] = {}

        async def has_finished() -> bool:  # the client has the answer before the scheduler knows
            sent = await client.get(f"/v1/requests/{answer['id']}/explain")
            assert sent.status_code == 200, sent.text
            found.update(sent.json())
            return found["state"] == "finished"

        await eventually(has_finished)
        assert found["object"] == "millrace.explanation"
        seconds = sum(one["seconds"] for one in found["waited"])
        assert abs(seconds - found["first_token_s"]) < 1e-6
        assert any("prefix cache" in one["what"] for one in found["helps"])
        assert not {"before", "suspended_by", "waits_for"} & found.keys()
        unknown = await client.get("/v1/requests/cmpl-nobody/explain")
        assert unknown.json()["error"]["code"] == "request_not_found"
