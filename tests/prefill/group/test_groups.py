"""Prompts computed by SP groups: the same tokens as one instance, and nothing is left held."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from millrace.core.config import TelemetryConfig
from millrace.core.instance import gang
from millrace.telemetry.tracing.files import read_trace
from millrace.telemetry.tracing.tracer import open_tracer
from millrace.transfer.ring.group_link import GroupLink
from millrace.transfer.transport.base import PeerLostError
from support.deadlines import eventually
from support.prefill_group import Group, Plan, group_of
from support.role_pair import finished_messages
from support.tiny_models import prompt
from support.worker_roles import LiveRole, config, remember, spec

SETTINGS = config(max_chunk_tokens=64)


def random_plan(rng: random.Random, instances: int, tokens: int) -> Plan:
    """Draws chunks of any lengths on groups that grow."""
    cuts = sorted({0, tokens, *(rng.randrange(tokens) for _ in range(rng.randrange(4)))})
    order = rng.sample(range(instances), instances)
    plan, size = [], 1
    for start, end in pairwise(cuts):
        size = rng.randint(size, instances)
        plan.append((end - start, order[:size]))
    return plan


async def alone(group: Group, tokens: int, **sampling: object) -> list[int]:
    name = f"alone-{tokens}"
    await group.ask(name, [(tokens, [0])], **sampling)
    return await group.tokens(name)


@pytest.mark.parametrize("model", ["llama", "qwen3-moe", "mixtral"])
async def test_any_plan_gives_the_tokens_of_one_alone(model: str) -> None:
    rng = random.Random(7)
    async with group_of(4, SETTINGS, model) as group:
        for tokens in (1, 3, 300):
            expected = await alone(group, tokens)
            for number in range(3):
                name, plan = f"{tokens}-{number}", random_plan(rng, 4, tokens)
                await group.ask(name, plan)
                assert await group.tokens(name) == expected, plan
                await group.idle()


async def test_a_pass_that_lacks_blocks_is_dropped_before_its_event_loop_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link ends its waits first and tells the loop then: compute must not go on meanwhile."""
    asked = 0

    def is_aborted(link: GroupLink) -> bool:
        nonlocal asked
        asked += threading.current_thread().name == "prefill-compute"
        return asked > 5

    async with group_of(2, SETTINGS) as group:
        with monkeypatch.context() as patch:
            patch.setattr(GroupLink, "is_aborted", property(is_aborted))
            await group.ask("r", [(300, [0, 1])])
            failed = [await one.said("request_failed", "r") for one in group.prefills]
        assert all(one.retryable and one.fault == "transfer" for one in failed)
        assert not any("chunk_finished" in one.kinds("r") for one in group.prefills)
        await group.idle()
        assert not any(len(one.role.prefix_cache) for one in group.prefills)


async def test_members_read_their_own_shards_of_the_prompt_alone() -> None:
    async with group_of(2, SETTINGS) as group:
        await group.ask("r", [(400, [0, 1])])
        await group.tokens("r")
        read = sum(stop - start for _, start, stop in group.store.slices)
        assert read == 400


async def test_history_that_a_member_gives_is_a_span_of_its_trace(tmp_path: Path) -> None:
    tracer = open_tracer(TelemetryConfig(trace_folder=str(tmp_path)), "prefill", "prefill-0")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with group_of(2, SETTINGS, tracer=tracer) as group:
        request = replace(spec("r", 600), traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
        await remember(group.store, request, prompt(600))
        group.admit(request)
        group.run(request, [(400, [0]), (200, [0, 1])])
        await group.tokens("r")
        await group.idle()
        token_bytes = group.prefills[0].engine.layout.bytes_per_token
    tracer.close()
    spans = read_trace(tmp_path, trace_id)
    (given,) = [span for span in spans if span.name == "balancing"]
    assert given.attributes["millrace.chunk"] == 1
    assert given.attributes["millrace.to"] == "prefill-1"
    given_tokens = given.attributes["millrace.bytes"] / token_bytes
    assert 100 <= given_tokens <= 300  # about half of the 600, less those that it computes
    (giver,) = [one for one in spans if one.span_id == given.parent_id]
    assert giver.name == "prefill" and "prefill-0" in giver.attributes["millrace.group"]
    chunks = [span for span in spans if span.name == "chunk" and span.parent_id == given.parent_id]
    first = next(one for one in chunks if one.attributes["millrace.number"] == 0)
    assert first.start_ns < given.start_ns <= given.end_ns


async def test_prompt_logprobs_come_from_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = finished_messages(monkeypatch)
    async with group_of(3, SETTINGS) as group:
        plans = {"one": [(250, [0])], "many": [(100, [1, 0]), (150, [1, 0, 2])]}
        for name, plan in plans.items():
            await group.ask(name, plan, prompt_logprobs=0)
            await group.tokens(name)
        expected, found = (finished[name].prompt_logprobs for name in plans)
        assert len(found) == len(expected) == 250
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one.chosen[0] == other.chosen[0]
            assert one.chosen[1] == pytest.approx(other.chosen[1], abs=1e-4)


async def test_a_short_request_passes_a_gang_and_both_get_their_tokens() -> None:
    async with group_of(2, config(max_chunk_tokens=256)) as group:
        expected_long, expected_short = await alone(group, 600), await alone(group, 20)
        leader = group.prefills[0]
        with leader.held_before_the_last_chunk("long"):
            await group.ask("long", [(600, [0, 1])])
            for number in range(3):
                await eventually(lambda: leader.kinds("long")[-1:] == ["chunk_started"])
                name = f"short-{number}"
                await group.ask(name, [(20, [number % 2])])
                group.order(number % 2, (name, 0), ("long", 0))
                assert await group.tokens(name) == expected_short
        assert await group.tokens("long") == expected_long
        kinds = leader.kinds("long")
        assert kinds.count("chunk_suspended") >= 2
        assert kinds.count("chunk_started") == 1 + kinds.count("chunk_suspended")
        assert group.prefills[1].kinds("long") == ["request_released"]  # the leader reports


async def test_overlapping_gangs_in_changing_orders_get_their_tokens() -> None:
    rng = random.Random(3)
    async with group_of(3, config(max_chunk_tokens=128)) as group:
        lengths = {20: await alone(group, 20), 700: await alone(group, 700)}
        plans: dict[str, Plan] = {}
        for number in range(12):
            tokens = rng.choice(list(lengths))
            plan = random_plan(rng, 3, tokens)
            plans[f"{number}-{tokens}"] = plan
            await group.ask(f"{number}-{tokens}", plan)
            ranked = rng.sample(list(plans), len(plans))
            for instance in range(3):  # one order for all instances
                group.order(
                    instance,
                    *(
                        (name, chunk)
                        for name in ranked
                        for chunk, (_, members) in enumerate(plans[name])
                        if instance in members
                    ),
                )
            await asyncio.sleep(rng.random() * 0.05)
        for name in plans:
            assert await group.tokens(name) == lengths[int(name.split("-")[1])]
        await group.idle()


@pytest.mark.parametrize("cancelled_first", [0, 1])
async def test_a_cancelled_gang_leaves_nothing(cancelled_first: int) -> None:
    async with group_of(2, SETTINGS) as group:
        await group.ask("r", [(2000, [0, 1])])
        await group.prefills[0].said("chunk_started", "r")
        group.prefills[cancelled_first].cancel("r")
        group.prefills[1 - cancelled_first].cancel("r")
        group.decode.cancel("r")
        await group.idle()
        assert all(role.engine.pool.used_pages == 0 for role in group.prefills)
        await group.ask("next", [(300, [1, 0])])
        await group.tokens("next")


@pytest.mark.parametrize(
    ("stages", "ranks", "pools"),
    [
        (2, 1, "own"),
        pytest.param(2, 1, "shared", marks=pytest.mark.slow),
        pytest.param(3, 1, "own", marks=pytest.mark.slow),
        pytest.param(2, 2, "own", marks=pytest.mark.slow),
        pytest.param(2, 2, "shared", marks=pytest.mark.slow),
    ],
)
async def test_members_may_have_stages(stages: int, ranks: int, pools: str) -> None:
    """With pools of their own, blocks of a layer arrive in the pool of the layer's stage. What a
    member has computed alone is given after its later stages have written it."""
    settings = config(max_chunk_tokens=128, stages=stages, tensor_parallel=ranks, kv_pools=pools)
    async with group_of(2, settings) as group:
        expected = await alone(group, 900)
        for name, plan in (
            ("from-the-start", [(300, [1, 0]), (600, [1, 0])]),
            ("grown", [(300, [1]), (20, [1, 0]), (580, [1, 0])]),
        ):
            await group.ask(name, plan)
            assert await group.tokens(name) == expected, name
        await group.idle()


async def test_what_a_member_gives_is_awaited_in_all_its_stages() -> None:
    """Only the last pass before the gift: its later stages end after those of earlier passes."""
    async with group_of(2, SETTINGS) as group:
        seen, prefill = [], group.prefills[1].engine.runner.prefill_batch

        def noted(tasks):
            seen.extend(task.awaits_kv for task in tasks)
            return prefill(tasks)

        group.prefills[1].engine.runner.prefill_batch = noted
        await group.ask("kept", [(150, [1]), (150, [1])])
        await group.tokens("kept")
        assert not any(seen)
        seen.clear()
        await group.ask("given", [(150, [1]), (300, [1, 0])])
        await group.tokens("given")
        assert seen == [False, False, True]


@pytest.mark.parametrize("pools", ["own", pytest.param("shared", marks=pytest.mark.slow)])
async def test_members_may_be_tensor_parallel(pools: str) -> None:
    """Sequence parallelism of tensor-parallel instances, with a suspension."""
    settings = config(max_chunk_tokens=128, tensor_parallel=2, kv_pools=pools)
    async with group_of(2, settings) as group:
        expected, expected_short = await alone(group, 900), await alone(group, 20)
        await group.ask("long", [(300, [1]), (600, [1, 0])])
        await group.prefills[1].said("chunk_started", "long")
        await group.ask("short", [(20, [0])])
        group.order(0, ("short", 0), ("long", 1))
        assert await group.tokens("short") == expected_short
        assert await group.tokens("long") == expected
        await group.idle()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"max_chunk_tokens": 32}, "engine.max_chunk_tokens of prefill-1 is 32"),
        ({"max_chunk_tokens": 64, "page_tokens": 8}, "page_tokens of prefill-1 is 8"),
    ],
)
async def test_members_that_differ_are_refused_by_name(other: dict, named: str) -> None:
    async with group_of(2, SETTINGS, last=config(**other)) as group:
        await group.ask("r", [(300, [0, 1])])
        failed = await group.prefills[0].said("request_failed", "r")
        assert named in failed.message
        await group.prefills[1].said("request_failed", "r")
        await group.idle()
        group.decode.cancel("r")


async def test_a_member_that_gives_up_ends_its_group_without_a_word_of_the_scheduler() -> None:
    async with group_of(3, SETTINGS) as group:
        await group.ask("r", [(2000, [0, 1, 2])])
        await group.prefills[0].said("chunk_started", "r")
        group.prefills[1].cancel("r")
        for other in (0, 2):
            failed = await group.prefills[other].said("request_failed", "r")
            assert failed.retryable
        await group.idle()
        group.decode.cancel("r")
        assert all(role.engine.pool.used_pages == 0 for role in group.prefills)


async def test_a_leader_that_is_linked_late_delays_no_other_prompt_and_stops_nobody() -> None:
    """A member's messages before the leader is linked to it are lost: no pool may stop for that."""
    async with group_of(2, SETTINGS) as group:
        leader, other = group.prefills
        expected, expected_short = await alone(group, 300), await alone(group, 20)
        connect, linked = leader.transport.connect, Future()
        with pytest.MonkeyPatch.context() as patch:
            of_other = other.transport.metadata()

            def late(metadata: bytes) -> Future[str]:
                return linked if metadata == of_other else connect(metadata)

            patch.setattr(leader.transport, "connect", late)
            await group.ask("gang", [(300, [0, 1])])
            await eventually(lambda: other.role.heartbeat().standstill is not None)
            await group.ask("short", [(20, [1])])
            group.order(1, ("short", 0), ("gang", 0))
            assert await group.tokens("short") == expected_short
            linked.set_result(connect(of_other).result())
            assert await group.tokens("gang") == expected
        await group.idle()


async def test_a_giver_that_was_never_linked_keeps_nobody_from_letting_go() -> None:
    """A new member asks the old member for history. The request is cancelled before the answer."""
    async with group_of(2, SETTINGS) as group:
        giver, receiver = group.prefills
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(giver.transport, "connect", lambda metadata: Future())
            await group.ask("r", [(100, [0]), (200, [0, 1])])
            await eventually(lambda: receiver.role.heartbeat().standstill is not None)
            for role in (giver, receiver, group.decode):
                role.cancel("r")
            await group.idle()


async def test_a_message_that_cannot_be_sent_breaks_its_group() -> None:
    async with group_of(2, SETTINGS) as group:
        leader, other = group.prefills
        with pytest.MonkeyPatch.context() as patch:
            lose_words_of_gangs(patch, other)
            await group.ask("r", [(300, [0, 1])])
            told = await other.said("request_failed", "r")
        assert "a message to prefill-0: prefill-0 is gone" in told.message
        assert told.retryable and (await leader.said("request_failed", "r")).retryable
        await group.idle()
        group.decode.cancel("r")


async def test_who_links_to_a_group_that_was_given_up_gives_up_too() -> None:
    async with group_of(2, SETTINGS) as group:
        leader, other = group.prefills
        with pytest.MonkeyPatch.context() as patch:
            lose_words_of_gangs(patch, other)
            late, connect = Future[str](), leader.transport.connect
            theirs = other.transport.metadata()
            patch.setattr(
                leader.transport,
                "connect",
                lambda metadata: late if metadata == theirs else connect(metadata),
            )
            # The group, not decode, must tell the leader.
            patch.setattr(group.decode.transport, "notify", lambda *_, **__: Future())
            await group.ask("r", [(300, [0, 1])])
            await other.said("request_failed", "r")
            late.set_result(connect(theirs).result())
            told = await leader.said("request_failed", "r")
        # Decode refuses a handshake that comes after the other member's end.
        assert told.retryable
        assert "prefill-1 gave up" in told.message or "r was given up" in told.message
        await group.idle()
        group.decode.cancel("r")


def lose_words_of_gangs(patch: pytest.MonkeyPatch, role: LiveRole) -> None:
    """Makes this instance's messages to its gangs fail at once."""
    failed: Future[None] = Future()
    failed.set_exception(PeerLostError("prefill-0 is gone"))
    notify = role.transport.notify
    patch.setattr(
        role.transport,
        "notify",
        lambda peer, payload, **how: (
            failed if payload[0] == gang.CHANNEL else notify(peer, payload, **how)
        ),
    )


def lose_starts(patch: pytest.MonkeyPatch, leader: LiveRole, after: int = 0) -> None:
    """Loses the leader's STARTs to its gangs, but for the first `after` of them."""
    notify = leader.transport.notify
    sent = 0

    def lossy(peer: str, payload: bytes, **how: bool) -> Future[None]:
        nonlocal sent
        is_start = payload[:2] == bytes([gang.CHANNEL, gang.MessageKind.START])
        sent += is_start
        return Future() if is_start and sent > after else notify(peer, payload, **how)

    patch.setattr(leader.transport, "notify", lossy)


async def test_instances_tell_what_they_wait_for_when_nothing_begins() -> None:
    async with group_of(2, SETTINGS) as group:
        leader = group.prefills[0]
        with pytest.MonkeyPatch.context() as patch:
            lose_starts(patch, leader)
            await group.ask("r", [(300, [0, 1])])
            await leader.said("chunk_started", "r")

            def stands_still(role: LiveRole) -> bool:
                return role.role.heartbeat().standstill is not None

            for role in group.prefills:
                await eventually(lambda role=role: stands_still(role))
        found = [role.role.heartbeat().standstill for role in group.prefills]
        assert [list(still.prepared) for still in found] == [["r"], ["r"]]
        assert [still.claimed for still in found] == ["r", "r"]
        assert "r/0 waits for operator" in found[0].waits_for
        assert "r/0 waits for START of prefill-0" in found[1].waits_for
        for role in (*group.prefills, group.decode):
            role.cancel("r")
        await group.idle()


@pytest.mark.parametrize("members", [[1, 0], [2]])
async def test_another_attempt_goes_on_from_what_landed_at_decode(members: list[int]) -> None:
    """A larger group follows, too: its members get the tokens that decode wrote back."""
    tokens = 2000
    async with group_of(3, SETTINGS) as group:
        expected = await alone(group, tokens)
        with pytest.MonkeyPatch.context() as patch:
            lose_starts(patch, group.prefills[0], after=1)  # the second chunk never begins
            await group.ask("r", [(tokens // 2, [0, 1]), (tokens - tokens // 2, [0, 1])])
            await group.decode.said("prefix_landed", "r")
            for role in group.prefills[:2]:
                role.cancel("r")
            await group.idle()
        said = [m for kind, m in group.decode.messages if kind == "prefix_landed"]
        landed = max(m.tokens for m in said if m.request_id == "r")
        assert 0 < landed < tokens

        request = spec("r", tokens)
        group.admit(request, attempt=2, kept=landed)
        larger = [*members, *(i for i in range(3) if i not in members)]
        rest = tokens - landed
        plan = [(rest // 2, members), (rest - rest // 2, larger)]
        group.run(request, plan, attempt=2, start=landed)
        assert await group.tokens("r") == expected
        await group.idle()


async def test_with_prompt_logprobs_nothing_is_gone_on_from() -> None:
    async with group_of(2, SETTINGS) as group:
        await group.ask("r", [(1000, [0, 1])], prompt_logprobs=0)
        await group.prefills[0].said("chunk_finished", "r")
        await group.tokens("r")
        assert "prefix_landed" not in group.decode.kinds("r")
