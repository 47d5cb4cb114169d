"""Where a prompt's KV goes: to the decode instance, or in shards to it and to other holders."""

from __future__ import annotations

from millrace.core.errors import TransferError
from millrace.core.scheduler.commands import RunPrefill
from millrace.core.span import Span
from millrace.core.token_events import FinishedPrefill
from millrace.instance.spans import span
from millrace.prefill.job import PrefillJob
from millrace.transfer.push.control import Sending, Target
from millrace.transfer.push.send.manager import SendManager
from millrace.wire.kv_peer import KvPeers


async def open_session(sender: SendManager, peers: KvPeers, job: PrefillJob) -> Sending:
    """Starts the handshakes of a job that has its pages. Raises TransferError."""
    if job.command.shards:
        return await sender.open_spread(
            job.request_id,
            targets(job.command, peers, leads=job.leads),
            prompt_tokens=job.prompt_tokens,
            pages=job.pages,
            attempt=job.attempt,
            runs=job.runs(),
        )
    decode = job.command.decode
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
    """Who gets which tokens of a prompt that is spread, the home first.

    The home gets the message of the end as it is, the others without tokens; who `leads` not tells
    nobody.
    Shards that begin behind the prompt get none. Raises TransferError for shards that are not the
    prompt in one piece, or whose first is not at the home.
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
        life, at = shard.holder.incarnation, shard.end_token
        found.append(
            Target(
                peer=peers.to(shard.holder.address),
                receiver=life,
                start_token=shard.start_token,
                end_token=min(at, prompt_tokens),
                word=(_without_tokens if found else _as_it_is) if leads else None,
                is_home=not found,
            )
        )
    if at < prompt_tokens:
        raise TransferError(
            f"request {request.request_id}: its shards end at token {at} of {prompt_tokens}"
        )
    home = command.decode.incarnation
    if command.shards[0].holder.incarnation != home:
        raise TransferError(
            f"request {request.request_id}: its first shard is at {found[0].receiver[0]}, its "
            f"home is {home.id}"
        )
    return found


def transfer_spans(job: PrefillJob, session: Sending) -> list[Span]:
    """The handshakes, and the transfer to all receivers as far as it has come: decode knows when
    it ended. What has not happened yet happens from now on.
    """
    now_s, timings = job.clock.now_s(), session.timings
    granted_s, first_write_s = (
        job.since_monotonic_s(t) if t else now_s for t in (timings.granted_s, timings.first_write_s)
    )
    opened_s = job.since_monotonic_s(timings.opened_s)
    to = ", ".join(session.receiver_ids)
    return [
        span("kv_handshake", job.instance_id, opened_s, granted_s),
        span("kv_transfer", job.instance_id, first_write_s, now_s, to=to),
    ]


def _as_it_is(finished: FinishedPrefill) -> FinishedPrefill:
    return finished


def _without_tokens(finished: FinishedPrefill) -> FinishedPrefill:
    """What those who hold a shard are told of the end: they emit no token."""
    return FinishedPrefill(total_chunks=finished.total_chunks)
