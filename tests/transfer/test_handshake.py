"""Backend allocation of Tetris section 4.2: order, reservation, no starvation; leases, fences."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import IntegrityError
from millrace.core.kv_layout import KvLayout
from millrace.core.kv_transfer import HandshakeAsk, Incarnation, Ticket
from millrace.transfer.handshake import GRACE_S, Backends, Lease, refusal

A, B, C = (Incarnation(f"prefill-{n}", 1) for n in range(3))
DECODE = Incarnation("decode-0", 3)
LAYOUT = KvLayout(
    model_hash="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    page_tokens=1,
    head_start=0,
    head_count=1,
    num_pages=1,
)


def test_requests_are_sorted_by_the_first_handshake_timestamp():
    backends = Backends(1)
    backends.ask("late", A, 2.0)
    backends.ask("early", B, 1.0)
    assert backends.grant() == [("early", B, 0)]
    assert backends.grant() == []
    backends.done("early", B)
    backends.end("early")
    assert backends.grant() == [("late", A, 0)]


def test_a_backend_stays_with_its_request_until_all_chunks_are_transferred():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.ask("second", C, 2.0)
    assert backends.grant() == [("first", A, 0)]
    backends.done("first", A)  # its first chunk is over, its second has not asked yet
    assert backends.grant() == []
    backends.ask("first", B, 3.0)
    assert backends.grant() == [("first", B, 0)]
    backends.done("first", B)
    backends.end("first")
    assert backends.grant() == [("second", C, 0)]


def test_a_later_request_never_takes_what_an_earlier_one_waits_for():
    backends = Backends(2)
    for sender in (A, B, C):
        backends.ask("first", sender, 1.0)
    backends.ask("second", A, 2.0)
    assert [g[0] for g in backends.grant()] == ["first", "first"]
    backends.ask("third", B, 0.5)  # an earlier timestamp goes before both
    backends.done("first", A)
    backends.end("first")
    assert [g[0] for g in backends.grant()] == ["third"]


def test_asking_again_keeps_the_place():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.grant()
    backends.ask("second", B, 2.0)
    backends.withdraw("second", B)
    backends.ask("third", C, 3.0)
    backends.ask("second", B, 4.0)
    backends.done("first", A)
    backends.end("first")
    assert backends.grant() == [("second", B, 0)]


def test_a_buffer_still_written_to_is_not_handed_out():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.grant()
    backends.end("first")
    backends.ask("second", B, 2.0)
    assert backends.grant() == [] and backends.free == 0
    backends.done("first", A)
    assert backends.grant() == [("second", B, 0)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 8))
def test_no_starvation_and_no_backend_lost(seed, count, requests):
    """Whatever the order of arrival and completion, every sender of every request gets its turn."""
    rng = random.Random(seed)
    backends = Backends(count)
    left = {f"r{n}": [Incarnation(f"s{k}", 1) for k in range(rng.randint(1, 4))]
            for n in range(requests)}  # fmt: skip
    todo = {name: len(senders) for name, senders in left.items()}
    first_ask, busy, waiting, idle, now_s = {}, [], set(), Counter(), 0.0
    for _ in range(10_000):
        if not todo:
            break
        now_s += 1
        asking = [name for name, senders in left.items() if senders]
        if asking and rng.random() < 0.5:
            name = rng.choice(asking)
            sender = left[name].pop()
            first_ask.setdefault(name, now_s)
            backends.ask(name, sender, now_s)
            waiting.add((name, sender))
        elif busy:
            name, sender = busy.pop(rng.randrange(len(busy)))
            backends.done(name, sender)
            idle[name] += 1
            todo[name] -= 1
            if not todo[name]:
                backends.end(name)
                del todo[name], idle[name]
        fresh = []
        for name, sender, _ in backends.grant():
            waiting.discard((name, sender))
            busy.append((name, sender))
            if idle[name]:
                idle[name] -= 1
            else:
                fresh.append(first_ask[name])
        # Nobody who came earlier still waits while a later request took a free backend.
        assert max(fresh, default=0) <= min((first_ask[n] for n, _ in waiting), default=now_s)
        assert len(busy) + idle.total() + backends.free == count
        backends.check_integrity()
    assert not todo and not waiting and backends.free == count


def test_a_lost_backend_is_found():
    backends = Backends(2)
    backends._free.append(0)
    with pytest.raises(IntegrityError, match="backends"):
        backends.check_integrity()


# -- leases


def lease() -> Lease:
    return Lease(
        number=1,
        request_id="r",
        attempt=1,
        sender=A,
        peer="p",
        layout=LAYOUT,
        backend=None,
        heard_s=10.0,
        renewed_s=12.0,
        told_s=12.0,
    )


def test_silence_lapses_a_lease_and_is_no_proof_that_nothing_lands():
    held = lease()
    assert not held.lapsed(15.0, 5.0) and held.lapsed(15.1, 5.0)
    assert not held.quiet(1e9, 5.0)


def test_a_drained_lease_is_quiet_at_once_and_never_lapses():
    held = lease()
    held.drained = True
    assert held.quiet(0.0, 5.0) and not held.lapsed(1e9, 5.0)


def test_a_dead_sender_is_quiet_after_the_grace():
    held = lease()
    held.lose(13.0, dead=True)
    held.lose(14.0, dead=False)
    assert not held.quiet(13.0 + GRACE_S - 0.01, 5.0) and held.quiet(13.0 + GRACE_S, 5.0)


def test_an_unreachable_sender_is_quiet_once_its_right_to_write_has_run_out():
    held = lease()
    held.lose(13.0, dead=False)
    assert not held.quiet(17.0 + GRACE_S - 0.01, 5.0) and held.quiet(17.0 + GRACE_S, 5.0)


# -- fences


def ask(sender=A, receiver=DECODE) -> HandshakeAsk:
    return HandshakeAsk(
        ticket=Ticket(request_id="r", sender=sender, receiver=receiver),
        layout=LAYOUT,
        start_token=0,
        num_tokens=1,
        agent_metadata=b"",
    )


def test_fences():
    def why(asked, newest):
        return refusal(asked, receiver=DECODE, layout=LAYOUT, newest=newest)

    assert why(ask(), {}) == ""
    assert why(ask(), {A.id: 1}) == ""
    assert "prefill-0 (generation 1) was replaced by generation 2" in why(ask(), {A.id: 2})
    stale = why(ask(receiver=Incarnation("decode-0", 2)), {})
    assert "decode-0 (generation 2)" in stale and "decode-0 (generation 3)" in stale
