"""`millrace explain` with a running scheduler, as a user types it."""

from __future__ import annotations

import json
import re

from support.command import millrace
from support.scheduler_peers import scheduler, spec


async def test_it_says_why_a_request_waits_and_writes_it_as_json(tmp_path) -> None:
    path = tmp_path / "explained.json"
    async with scheduler() as net:
        for name in ("p0", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("first", 100))
        await proxy.next("placed")
        status, shown = await millrace(
            "explain", "first", "--scheduler", net.address, "--json", str(path)
        )
        unknown, said = await millrace("explain", "nobody", "--scheduler", net.address)
    assert status == 0
    assert shown.startswith("request      first, prefilling, class default\n")
    assert re.search(r"\norder        millrace, (late|due): to be done ", shown)
    assert "\nwaits for    p0 to begin it\n" in shown
    written = json.loads(path.read_text())
    assert written["request_id"] == "first" and written["part"] in {"late", "due"}
    assert {one["reason"] for one in written["waited"]} <= {
        "room at a decode instance",
        "a prefill instance",
        "its turn at its instances",
    }
    assert unknown == 1
    assert said == "millrace: no request 'nobody' is known, or no longer\n"
