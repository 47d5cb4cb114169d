"""`millrace policy` against a running scheduler, as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from millrace.core.priority import POLICIES
from support.scheduler_peers import scheduler


async def policy(*arguments: str) -> tuple[int | None, str]:
    """Exit status and output of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millrace.cli", "policy", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "120"},
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, output.decode()


async def test_it_shows_and_changes_the_policy_and_writes_both_as_json(tmp_path) -> None:
    path = tmp_path / "answer.json"
    async with scheduler() as net:
        address = ("--scheduler", net.address)
        assert await policy("s_edf", *address, "--json", str(path)) == (0, "millrace -> s_edf\n")
        assert json.loads(path.read_text()) == {"policy": "s_edf", "before": "millrace"}
        status, shown = await policy(*address, "--json", str(path))
        assert (status, shown.split()[:6]) == (
            0,
            ["policy", "s_edf", "preemption", "operator", "planner", "least_queue"],
        )
        assert json.loads(path.read_text()) == {
            "policy": "s_edf",
            "preemption": "operator",
            "planner": "least_queue",
            "policies": list(POLICIES),
        }


async def test_what_goes_wrong_is_said_in_one_line(tmp_path) -> None:
    async with scheduler() as net:
        address = ("--scheduler", net.address)
        told = f"millrace: policy is 'sjf'; it must be one of {', '.join(POLICIES)}\n"
        assert await policy("sjf", *address) == (1, told)
        status, said = await policy(*address, "--json", str(tmp_path))
        assert status == 1 and said.splitlines()[-1].startswith(f"millrace: --json {tmp_path}: ")
        assert (await net.status()).policy == "millrace"
    status, said = await policy("edf", *address)
    assert status == 1 and said.startswith(f"millrace: no scheduler at {net.address}: ")
    assert said.count("\n") == 1
