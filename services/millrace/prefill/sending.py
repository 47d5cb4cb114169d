"""Opens the transfer of a prompt's KV to its decode instance, or in shards also to KVP workers, and
traces what a job has sent.
"""

from __future__ import annotations

from millrace.core.errors import TransferError
from millrace.core.scheduler.commands import RunPrefill
from millrace.core.span import Span
from millrace.core.token_events import FinishedPrefill
from millrace.instance.spans import span
from millrace.prefill.job import PrefillJob
from millrace.transfer.push.control import Sending, Target
from millrace.transfer.push.send.manager import SendManager
from millrace.transfer.ring.group_link import GroupLink
from millrace.wire.clients.kv_peer import KvPeers


async def open_session(sender: SendManager, peers: KvPeers, job: PrefillJob) -> Sending | None:
    """Starts the handshakes of a job after its pages are reserved. Raises TransferError.

    Returns None for a prefill-only job, whose KV goes nowhere.
    """
    decode = job.command.decode
    if decode is None:
        return None
    if job.command.shards:
        return await sender.open_spread(
            job.request_id,
            targets(job.command, peers, leads=job.leads),
            prompt_tokens=job.prompt_tokens,
            pages=job.pages,
            attempt=job.attempt,
            runs=job.runs(),
        )
    return await sender.open(
        job.request_id,
        peer=peers.to(decode.address),
        receiver=decode.incarnation,
        prompt_tokens=job.prompt_tokens,
        pages=job.pages,
        attempt=job.attempt,
        runs=job.runs(),
    )


def targets(command: RunPrefill, peers: KvPeers, *, leads: bool) -> list[Target]:
    """Lists the receivers of a spread prompt with their tokens, the KV owner first.

    The leader's final message has the first tokens for the KV owner, none for KVP workers; members
    that do not lead send no final message. Shards that begin after the prompt are not listed.
    Raises TransferError for shards that do not cover the prompt in order without gaps, or whose
    first is not at the KV owner.
    """
    request, prompt_tokens = command.request, command.request.prompt_tokens
    found: list[Target] = []
    at = 0
    for shard in command.shards:
        if at >= prompt_tokens:
            break
        if shard.start_token != at or shard.end_token <= at:
            raise TransferError(
                f"request {request.request_id}: a shard is tokens {shard.start_token}.."
                f"{shard.end_token - 1}; it must begin at token {at}"
            )
        incarnation, at = shard.worker.incarnation, shard.end_token
        found.append(
            Target(
                peer=peers.to(shard.worker.address),
                receiver=incarnation,
                start_token=shard.start_token,
                end_token=min(at, prompt_tokens),
                final_message=(_without_tokens if found else _as_it_is) if leads else None,
                is_owner=not found,
            )
        )
    if at < prompt_tokens:
        raise TransferError(
            f"request {request.request_id}: its shards end at token {at} of {prompt_tokens}"
        )
    assert command.decode is not None  # shards are KV of requests that decode
    owner = command.decode.incarnation
    if command.shards[0].worker.incarnation != owner:
        raise TransferError(
            f"request {request.request_id}: its first shard is at {found[0].receiver[0]}, its "
            f"KV owner is {owner.id}"
        )
    return found


def transfer_spans(job: PrefillJob, session: Sending) -> list[Span]:
    """Builds the spans of the handshakes and of the transfer to all receivers, up to now; decode
    sets the end of the transfer. A step that has not happened yet begins now.
    """
    now_s, timings, to = job.now_s(), session.timings, ", ".join(session.receiver_ids)
    granted_s = _since_arrival(job, timings.granted_s, now_s)
    first_write_s = _since_arrival(job, timings.first_write_s, now_s)
    opened_s = _since_arrival(job, timings.opened_s, now_s)
    return [
        span("kv_handshake", job.instance_id, opened_s, granted_s),
        span("kv_transfer", job.instance_id, first_write_s, now_s, to=to),
    ]


def trace_sent(job: PrefillJob, session: Sending) -> None:
    """Traces the handshakes and the writes of a closed session. (Decode traces the transfer, which
    ends when the KV has landed there.)
    """
    now_s, timings, to = job.now_s(), session.timings, ", ".join(session.receiver_ids)
    if timings.granted_s:
        opened_s = _since_arrival(job, timings.opened_s, now_s)
        job.trace.trace(
            "kv_handshake", opened_s, _since_arrival(job, timings.granted_s, now_s), to=to
        )
    if timings.bytes:
        first_s = _since_arrival(job, timings.first_write_s, now_s)
        last_s = _since_arrival(job, timings.last_write_s, now_s)
        job.trace.trace("kv_send", first_s, last_s, to=to, bytes=timings.bytes)


def trace_exchanged(job: PrefillJob, link: GroupLink) -> None:
    """Traces the K/V that a closed link sent round the ring, and what it gave to other members by
    cache balancing before a chunk.
    """
    job.trace.trace("ring", job.met_s, job.now_s(), bytes=link.bytes_sent)
    clock = job.trace.clock
    for gift in link.given:
        job.trace.trace(
            "balancing",
            clock.at_monotonic_s(gift.began_s),
            clock.at_monotonic_s(gift.ended_s),
            chunk=gift.chunk,
            to=link.name_of(gift.peer),
            bytes=gift.bytes_sent,
        )


def _since_arrival(job: PrefillJob, monotonic_s: float, now_s: float) -> float:
    """Converts a time of `SendTimings` to seconds since the arrival; 0 becomes `now_s`."""
    return job.trace.clock.at_monotonic_s(monotonic_s) if monotonic_s else now_s


def _as_it_is(finished: FinishedPrefill) -> FinishedPrefill:
    return finished


def _without_tokens(finished: FinishedPrefill) -> FinishedPrefill:
    """Returns the final message for KVP workers, which emit no token."""
    return FinishedPrefill(total_chunks=finished.total_chunks)
