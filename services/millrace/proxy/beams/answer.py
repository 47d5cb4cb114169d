"""Answers requests by beam search: every step is a request of one new token for each beam.

Such requests end at prefill, and never touch decode. The beams share the KV of their beginning
through the prefix cache, so that a step computes the last tokens alone: less than a block each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np

from millrace.core.token_events import PositionLogprobs
from millrace.proxy.beams.search import Beam, BeamSearch, candidates
from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival, Builder
from millrace.proxy.reply.reply import GeneratingReply, Progress
from millrace.proxy.request.options import Options
from millrace.proxy.text.prefix import longer_blocks


class BeamAnswer:
    """Searches the answers to all prompts of a body, step by step."""

    def __init__(
        self,
        model: ServedModel,
        builder: Builder,
        options: Options,
        arrival: Arrival,
    ) -> None:
        """`options.length_penalty` is set."""
        self._gateway = model.gateway
        self._builder = builder
        self._options = options
        self._step_options = _of_a_step(options)
        # A step is over with its first token: an objective of the whole answer says nothing of it.
        slo = replace(arrival.slo, e2e_s=None, tbt_s=None)
        self._arrival = replace(arrival, slo=slo, trace=False)

    async def submit(self, reply: GeneratingReply) -> None:
        """Generates the answers of the reply's requests, one for each prompt.

        Raises ApiError (503, 429) if a step is not taken. After an error the caller leaves the
        requests, and so their parts, which are the requests of the present step.
        """
        progress = reply.progress
        searches = {request: self._search(request) for request in progress.requests}
        for number in count():
            step = _Step(progress)
            for request, search in searches.items():
                self._add(number, step, request, search)
            if not step.progress.requests:
                break
            for part in step.progress.requests:
                await self._gateway.submit(part)
            found = iter(await step.end())
            if progress.finished:  # an error, or the client has left
                return
            for request, search in searches.items():
                if search.open:
                    _note(request)
                    search.extend(list(islice(found, len(search.open))))
        for request, search in searches.items():
            self._finish(request, search.best())

    def _search(self, request: ProxyRequest) -> BeamSearch:
        sampling, penalty = request.spec.sampling, self._options.length_penalty
        assert penalty is not None
        return BeamSearch(
            request.prompt_tokens,
            len(request.choices),
            sampling.max_tokens,
            sampling.stop_token_ids,
            penalty,
        )

    def _add(self, number: int, step: _Step, whole: ProxyRequest, search: BeamSearch) -> None:
        """Adds a request for every open beam of a prompt to the step."""
        arrival = self._arrival
        if number:
            unix_s = time.time_ns() / 1e9
            arrival = replace(arrival, at=time.monotonic(), unix_s=unix_s, fails_early=False)
        prompts = [_prompt(whole, beam) for beam in search.open]
        name = f"{whole.request_id}-s{number}"
        whole.parts = self._builder.requests(name, step, prompts, self._step_options, arrival)

    def _finish(self, request: ProxyRequest, beams: Sequence[Beam]) -> None:
        """Gives the request's choices their tokens; the best is the first."""
        request.parts = []
        for choice, beam in zip(request.choices, beams, strict=False):
            reason = "length" if beam.stop_token_id < 0 else "stop"
            shown = max(self._options.shown_logprobs, 0)
            positions = [PositionLogprobs(one.chosen, one.top[:shown]) for one in beam.positions]
            piece = choice.feed_piece(beam.token_ids, positions, reason, beam.stop_token_id)
            request.sink.on_piece(choice, piece)
        for _ in request.choices:
            request.end_choice()


def _of_a_step(options: Options) -> Options:
    """Returns the options of a step's requests: one token, and the likeliest in its place."""
    sampling = options.sampling._replace(
        max_tokens=1,
        temperature=0.0,
        stop_token_ids=(),
        logprobs=max(candidates(options.choices), options.shown_logprobs),
    )
    return options._replace(
        sampling=sampling, choices=1, return_token_ids=False, tools=None, truncation=None
    )


def _prompt(whole: ProxyRequest, beam: Beam) -> EnginePrompt:
    ids = np.concatenate([whole.prompt_ids, np.array(beam.token_ids, dtype=np.int32)])
    return EnginePrompt(ids=ids, blocks=longer_blocks(whole.spec, ids))


def _note(whole: ProxyRequest) -> None:
    """Notes the times of a prompt's step that is over."""
    first, last = whole.parts[0], max(part.last_token_at for part in whole.parts)
    if not whole.has_begun:
        whole.started_at, whole.submitted_at = first.started_at, first.submitted_at
        whole.placed_at, whole.predicted_ttft_s = first.placed_at, first.predicted_ttft_s
        whole.first_token_at, whole.cached_tokens = first.first_token_at, first.cached_tokens
        whole.spans.extend(first.spans)
    whole.last_token_at = last


class _Step:
    """Gathers the likeliest next tokens of all open beams."""

    def __init__(self, whole: Progress) -> None:
        """`whole`: of the reply, which fails with the step."""
        self.progress = Progress(None)
        self._whole = whole
        self._found: dict[Choice, PositionLogprobs] = {}

    async def end(self) -> list[PositionLogprobs]:
        """Returns what was found, in the order of the requests; of fewer requests once the reply
        has failed.
        """
        while not (self.progress.finished or self._whole.finished):
            await self._whole.signal.wait()
        asked = [request.choices[0] for request in self.progress.requests]
        return [self._found[choice] for choice in asked if choice in self._found]

    def on_text(self, choice: Choice, text: str) -> None:
        raise AssertionError("a step asks for log probabilities")

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        (entry,) = piece.entries
        assert entry.position is not None
        self._found[choice] = entry.position

    def echo(self, choice: Choice, piece: Piece) -> None:
        raise AssertionError("a beam search echoes no prompt")

    def on_done(self, request: ProxyRequest) -> None:
        del request
        self.progress.done()
        self._whole.signal.wake()

    def on_error(self, error: ApiError) -> None:
        self._whole.fail(error)
