"""Writes a stream's events again, from its source and its tokens.

A replay feeds tokens to a request and a reply of the same kinds that made the events at first, one
token an event, as decode instances send them. So it makes the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.core.request import RequestState
from millrace.core.request_spec import RequestSpec, finish_reason
from millrace.core.token_events import TokenDetail, TokenEvent
from millrace.proxy.models.models import Models
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.event_numbers import EventId, EventNumbers
from millrace.proxy.reply.reply import EventReply
from millrace.proxy.request.options import Options
from millrace.proxy.streams.apis import APIS
from millrace.proxy.streams.source import (
    StreamSource,
    StreamState,
    read_source,
    read_state,
    slo_of,
)
from millrace.proxy.text.encoder_process import TokenArray
from millrace.proxy.text.prefix import PromptBlocks
from millrace.state.store import RequestRecord, RequestStore, StoreError
from millrace.state.streams import StreamRecord
from millrace.wire.codec.request_spec import decode_spec


class Diverged(Exception):
    """The tokens are not those that were streamed before."""


class Replay:
    """One stream, written again up to its last known token."""

    def __init__(self, reply: EventReply, numbers: EventNumbers, cached_tokens: int) -> None:
        [self.request] = reply.progress.requests
        self.reply = reply
        self._numbers = numbers
        self._cached_tokens = cached_tokens
        self._sampling = self.request.spec.sampling
        self._stop_ids = frozenset(self._sampling.stop_token_ids)
        self._tokens: list[int] = []

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the tokens end the answer."""
        return self.request.has_ended

    def feed(self, start: int, token_ids: Sequence[int]) -> None:
        """Takes tokens that follow the first `start` tokens. Raises Diverged."""
        known = self._tokens[start : start + len(token_ids)]
        if list(token_ids[: len(known)]) != known:
            raise Diverged
        for token_id in token_ids[len(known) :]:
            if self.finished:
                break  # generated before the engine knew of the stop string
            self._tokens.append(token_id)
            self.request.take(self._event(token_id), time.monotonic())
        if self._numbers.diverged or (self.finished and not self._numbers.reached):
            raise Diverged

    def _event(self, token_id: int) -> TokenEvent:
        reason = finish_reason(self._sampling, len(self._tokens), token_id, self._stop_ids)
        return TokenEvent(
            self.request.spec.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=token_id if reason == "stop" else -1,
            detail=TokenDetail(cached_tokens=self._cached_tokens),
        )


class Replays:
    """Makes replays of streams from their sources.

    Methods raise ApiError (404) if the model of a stream is gone.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def to_read(
        self, source: StreamSource, cached_tokens: int, after: EventId | None = None
    ) -> Replay:
        """Returns a replay for a client that has the events up to `after`. It can't go on."""
        ids = np.zeros(source.prompt_tokens, dtype=np.int32)
        if source.context_ids:
            ids[-len(source.context_ids) :] = source.context_ids
        prompt = EnginePrompt(ids=ids, end=source.prompt_end)
        return self._make(source, prompt, self._options(source), "", cached_tokens, after, 0.0)

    def to_continue(
        self,
        source: StreamSource,
        spec: RequestSpec,
        prompt_ids: TokenArray,
        cached_tokens: int,
        age_s: float,
    ) -> Replay:
        """Returns a replay whose request can go on.

        `spec` is of its last incarnation, `prompt_ids` are that incarnation's, int32 [tokens].
        `age_s`: since its arrival, by a clock that all replicas have in common.
        """
        options = self._options(source)
        sampling = options.sampling._replace(seed=spec.sampling.seed)
        options = options._replace(sampling=sampling)
        blocks = PromptBlocks()
        if spec.prefix_block_tokens:
            whole = source.prompt_tokens // spec.prefix_block_tokens
            blocks = PromptBlocks(
                block_tokens=spec.prefix_block_tokens,
                root=spec.prefix_root,
                hashes=spec.prefix_hashes[:whole],
            )
        ids = prompt_ids[: source.prompt_tokens]
        prompt = EnginePrompt(ids=ids, end=source.prompt_end, blocks=blocks)
        replay = self._make(source, prompt, options, spec.tenant, cached_tokens, None, age_s)
        request = replay.request
        request.suspect(spec.deaths)
        request.spec = replace(request.spec, traceparent=spec.traceparent)
        return replay

    def _options(self, source: StreamSource) -> Options:
        model = self._models.of_stream(source.model)
        return APIS[source.api].read_options(model, source.plain_body)

    def _make(
        self,
        source: StreamSource,
        prompt: EnginePrompt,
        options: Options,
        tenant: str,
        cached_tokens: int,
        after: EventId | None,
        age_s: float,
    ) -> Replay:
        arrival = Arrival(
            at=time.monotonic() - age_s,
            unix_s=source.created_s,
            slo=slo_of(source),
            tenant=tenant,
            trace=False,
            id_digits=source.id_digits,
        )
        numbers = EventNumbers(after)
        model = self._models.of_stream(source.model)
        _, reply = APIS[source.api].build(model, [prompt], options, arrival, numbers)
        return Replay(reply, numbers, cached_tokens)


async def is_left_over(replays: Replays, requests: RequestStore, record: StreamRecord) -> bool:
    """Whether a stream's request is cancelled, as by the scheduler when its proxy leaves, or
    finished and its journal whole.
    """
    state = read_state(record.body)
    request = await requests.get(state.incarnation)
    if request is None or request.state != RequestState.FINISHED.value:
        return request is not None and request.state == RequestState.CANCELLED.value
    source = read_source(record.source)
    replay = await rebuilt(replays, requests, source, state, record.age_s)
    return replay is not None and replay.finished


async def rebuilt(
    replays: Replays,
    requests: RequestStore,
    source: StreamSource,
    state: StreamState,
    age_s: float,
) -> Replay | None:
    """Returns a stream up to its last journalled token. Its request can go on, unless its answer is
    whole. None: it has failed, or its record or its prompt is gone. `age_s`: as in `StreamRecord`.
    """
    record = await requests.get(state.incarnation)
    if record is None:
        return None
    cached = state.cached_tokens or 0  # None: no event of a token was sent
    tokens = (await requests.journal(state.incarnation, 0)).tolist()
    if record.state in (RequestState.FINISHED.value, RequestState.FAILED.value):
        whole = _fed(replays.to_read(source, cached), tokens)
        if whole.finished:
            return whole
        if record.state == RequestState.FAILED.value:
            return None
    # The scheduler cancels the requests of a dead replica. Of a finished request the journal may
    # lack the last tokens, with their instance: they are generated again.
    ids = await _kept_prompt(requests, record)
    if ids is None:
        return None
    replay = replays.to_continue(source, decode_spec(record.spec), ids, cached, age_s)
    replay.request.stored[state.incarnation] = record.spec
    return _fed(replay, tokens)


def _fed(replay: Replay, tokens: Sequence[int]) -> Replay:
    try:
        replay.feed(0, tokens)
    except Diverged:
        raise AssertionError("nothing was fed before") from None
    return replay


async def _kept_prompt(requests: RequestStore, record: RequestRecord) -> TokenArray | None:
    """Returns the prompt, int32 [tokens]; None if it has been released. Raises StoreError."""
    try:
        return await requests.prompt_ids(record.request_id)
    except StoreError:
        if not RequestState(record.state).is_final:
            raise
        await requests.ping()
        return None
