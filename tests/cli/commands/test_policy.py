"""`millrace policy` with a running scheduler, as a user types it."""

from __future__ import annotations

import json

from millrace.core.config import load_config
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
            "weights": {"classes": {"default": 1.0}, "tenants": {"default": 1.0}},
            "policies": list(POLICIES),
        }


async def test_it_changes_weights_alone_or_with_the_policy(tmp_path) -> None:
    path, file = tmp_path / "answer.json", tmp_path / "millrace.toml"
    file.write_text("[slo_classes.document]\nweight = 4\n[tenants.acme]\nweight = 0.5\n")
    async with scheduler(load_config(file)) as net:

        async def policy(*arguments: str) -> tuple[int | None, str]:
            return await millrace("policy", *arguments, "--scheduler", net.address)

        _, shown = await policy()
        assert shown.splitlines()[4:] == [
            "classes     default 1, document 4",
            "tenants     acme 0.5, default 1",
        ]
        changes = ("--weight", "document=2", "--tenant-weight", "acme=3", "--json", str(path))
        assert await policy(*changes) == (
            0,
            "classes     default 1, document 2\ntenants     acme 3, default 1\n",
        )
        weights = {"classes": {"default": 1, "document": 2}, "tenants": {"acme": 3, "default": 1}}
        answer = {"policy": "millrace", "before": "millrace", "weights": weights}
        assert json.loads(path.read_text()) == answer
        status, said = await policy("edf", "--weight", "default=8")
        assert (status, said.splitlines()[0]) == (0, "millrace -> edf")
        for wrong, told in (
            (("--weight", "chat=2"), "weights.classes is 'chat'; it must be one of default, docum"),
            (("--tenant-weight", "x=2"), "weights.tenants is 'x'; it must be one of acme, default"),
            (("--weight", "document"), "--weight 'document': write it as NAME=WEIGHT, a number be"),
            (("--weight", "document=0"), "--weight 'document=0': write it as NAME=WEIGHT"),
            (("sjf", "--weight", "document=9"), "policy is 'sjf'"),
        ):
            status, said = await policy(*wrong)
            assert status == 1 and said.startswith(f"millrace: {told}") and said.count("\n") == 1
        status, shown = await policy()
        assert "classes     default 8, document 2" in shown


async def test_what_goes_wrong_is_said_in_one_line(tmp_path) -> None:
    async with scheduler() as net:
        address = ("--scheduler", net.address)
        told = f"millrace: policy is 'sjf'; it must be one of {', '.join(POLICIES)}\n"
        assert await millrace("policy", "sjf", *address) == (1, told)
        status, said = await millrace("policy", *address, "--json", str(tmp_path))
        assert status == 2 and f"Invalid value for '--json': file '{tmp_path}' is a dir" in said
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
