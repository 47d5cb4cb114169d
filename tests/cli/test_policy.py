"""`millrace policy` with a running scheduler, as a user types it."""

from __future__ import annotations

import json

from millrace.core.priority import POLICIES
from support.command import millrace
from support.scheduler_peers import scheduler


async def test_it_shows_and_changes_the_policy_and_writes_both_as_json(tmp_path) -> None:
    path = tmp_path / "answer.json"
    async with scheduler() as net:
        address = ("--scheduler", net.address)
        done = await millrace("policy", "s_edf", *address, "--json", str(path))
        assert done == (0, "millrace -> s_edf\n")
        assert json.loads(path.read_text()) == {"policy": "s_edf", "before": "millrace"}
        status, shown = await millrace("policy", *address, "--json", str(path))
        assert (status, shown.split()[:6]) == (
            0,
            ["policy", "s_edf", "preemption", "operator", "planner", "auto"],
        )
        assert json.loads(path.read_text()) == {
            "policy": "s_edf",
            "preemption": "operator",
            "planner": "auto",
            "improvement_rate": 0.3,
            "policies": list(POLICIES),
        }


async def test_what_goes_wrong_is_said_in_one_line(tmp_path) -> None:
    async with scheduler() as net:
        address = ("--scheduler", net.address)
        told = f"millrace: policy is 'sjf'; it must be one of {', '.join(POLICIES)}\n"
        assert await millrace("policy", "sjf", *address) == (1, told)
        status, said = await millrace("policy", *address, "--json", str(tmp_path))
        assert status == 1 and said.splitlines()[-1].startswith(f"millrace: --json {tmp_path}: ")
        assert (await net.status()).policy == "millrace"
    status, said = await millrace("policy", "edf", *address)
    assert status == 1 and said.startswith(f"millrace: no scheduler at {net.address}: ")
    assert said.count("\n") == 1


async def test_the_improvement_rate_has_a_command_of_its_own() -> None:
    async with scheduler() as net:

        async def rate(*arguments: str) -> tuple[int | None, str]:
            return await millrace("improvement-rate", *arguments, "--scheduler", net.address)

        assert await rate("0.05") == (0, "0.3 -> 0.05\n")
        assert await rate() == (0, "0.05\n")
        assert await rate("0.5:0.2,1:0.4") == (0, "0.05 -> 0.3\n")  # nobody has arrived so far
        for wrong, said in (("1.5", "rate is 1.5; it must"), ("1:2,3", "rates is '1:2,3'")):
            status, told = await rate(wrong)
            assert status == 1 and told.startswith(f"millrace: {said}") and told.count("\n") == 1
        assert (await net.status()).improvement_rate == 0.3
