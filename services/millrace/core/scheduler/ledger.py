"""Follows what one instance holds, from the scheduler's commands and the instance's reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from millrace.core.request import Shard
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import AdmitDecode, Cancel, Command, KvShard, RunPrefill
from millrace.core.scheduler.held import Held
from millrace.core.scheduler.reports import (
    ChunkFinished,
    ChunkStarted,
    ChunkSuspended,
    DecodeStarted,
    FirstTokenSent,
    PrefixLanded,
    Report,
    RequestFailed,
    RequestFinished,
    RequestReleased,
)

#: So many prompts that were computed and sent are remembered: decode's report of the first token,
#: which tells the same, may still be on its way then.
MOST_COMPLETE = 256


class Ledger:
    """Each request that the instance holds, as of the last command and the last report."""

    def __init__(self, held: Iterable[Held] = ()) -> None:
        self._held: dict[str, Held] = {}
        self._complete: dict[str, Held] = {}
        for one in held:
            (self._complete if one.complete else self._held)[one.request_id] = one

    def held(self) -> tuple[Held, ...]:
        """Returns what the instance holds, and the last prompts that it has computed and sent."""
        left = [one for name, one in self._complete.items() if name not in self._held]
        return (*left, *self._held.values())

    def get(self, request_id: str) -> Held | None:
        return self._held.get(request_id)

    def commanded(self, command: Command) -> None:
        """Takes a command that the instance carries out."""
        match command:
            case RunPrefill():
                self._run(command)
            case AdmitDecode():
                self._admit(command)
            case Cancel(request_id=request_id):
                if (held := self._held.get(request_id)) is not None:
                    self._held[request_id] = replace(held, leaving=True)

    def _run(self, command: RunPrefill) -> None:
        held = self._held.get(command.request.request_id)
        if held is None:
            target = None if command.decode is None else command.decode.incarnation
            held = replace(
                _new(command.request, command.attempt, command.shards),
                decode=target,
                kept_tokens=command.chunks[0].start_token,
            )
        self._held[held.request_id] = replace(held, chunks=command.chunks)

    def _admit(self, command: AdmitDecode) -> None:
        known = self._held.get(command.request.request_id)
        new = _new(command.request, command.attempt, command.shards)
        self._held[new.request_id] = replace(
            new,
            kept_tokens=command.kept_tokens,
            landed_tokens=command.kept_tokens,
            leaving=known is not None and known.leaving,
        )

    def reported(self, report: Report) -> None:
        """Takes a report of the instance. Reports without a held request change nothing."""
        request_id = getattr(report, "request_id", "")
        held = self._held.get(request_id)
        if held is None:
            return
        match report:
            case RequestReleased() | RequestFinished():
                del self._held[request_id]
                if isinstance(report, RequestReleased) and report.complete:
                    self._note_complete(held)
            case _:
                self._held[request_id] = _after(held, report)

    def _note_complete(self, held: Held) -> None:
        self._complete.pop(held.request_id, None)
        done = replace(held, chunks_done=len(held.chunks), computing=False, complete=True)
        self._complete[held.request_id] = done
        if len(self._complete) > MOST_COMPLETE:
            del self._complete[next(iter(self._complete))]


def _after(held: Held, report: Report) -> Held:
    match report:
        case ChunkStarted(chunk_index=index):
            return replace(held.advanced(index), computing=True)
        case ChunkSuspended(chunk_index=index, compute_s=compute_s):
            return replace(held.advanced(index), computing=False, compute_s=compute_s)
        case ChunkFinished(chunk_index=index):
            return held.advanced(index + 1)
        case PrefixLanded(attempt=attempt, tokens=tokens) if attempt == held.attempt:
            return replace(held, landed_tokens=max(tokens, held.landed_tokens))
        case FirstTokenSent():
            return replace(held, first_token=True)
        case DecodeStarted():
            return replace(held, first_token=True, decoding=True)
        case RequestFailed(attempt=attempt, kept_tokens=kept):
            if attempt and attempt < held.attempt:
                return held
            if kept:
                return replace(held, failed=True, landed_tokens=kept)
            return replace(held, leaving=True)
    return held


def _new(spec: RequestSpec, attempt: int, shards: tuple[KvShard, ...]) -> Held:
    return Held(
        request_id=spec.request_id,
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.sampling.max_tokens,
        choices=spec.sampling.n,
        attempt=attempt,
        shards=tuple(
            Shard(
                worker_id=shard.worker.incarnation.id,
                start_token=shard.start_token,
                end_token=shard.end_token,
            )
            for shard in shards
        ),
    )
