"""Builds the engine requests of a checked request, and the reply that gathers their output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.core.incarnation import Incarnation
from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec
from millrace.proxy.generation.choice import Choice
from millrace.proxy.generation.echo import Echo
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.parsing.families import Parsers
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.engine_sampling import EngineSampling
from millrace.proxy.reply.event_numbers import EventNumbers
from millrace.proxy.reply.formats import ChatFormat, CompletionFormat, Format
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.reply.reply import (
    GeneratingReply,
    Progress,
    Reply,
    StreamReply,
    WholeReply,
)
from millrace.proxy.request.options import Limits, Options
from millrace.proxy.tenancy.exchange import Exchange
from millrace.proxy.text.tokenizer import Tokenizer
from millrace.proxy.tracing.waterfalls import explain
from millrace.telemetry.tracing.tracer import NO_SCOPE, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Describes when and how a request arrived. `at` is in seconds on the monotonic clock."""

    at: float
    unix_s: float
    slo: Slo
    tenant: str
    trace: bool
    #: The digits of the response's id.
    id_digits: str
    traceparent: str = ""
    #: The HTTP request's span.
    scope: Scope = NO_SCOPE
    #: The HTTP request, for its limits; None if nothing limits it.
    exchange: Exchange | None = None
    #: The client wants an error instead of a first token after the TTFT objective.
    fails_early: bool = False


class Builder:
    """Builds requests and replies of one of the two APIs."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer,
        proxy: Incarnation,
        parsers: Parsers,
        *,
        chat: bool,
    ) -> None:
        """`parsers` parse the answers of chats."""
        self._limits = limits
        self._tokenizer = tokenizer
        self._proxy = proxy
        self._parsers = parsers
        self._chat = chat
        self._sampling = EngineSampling(limits, tokenizer, parsers)
        self._id_prefix = "chatcmpl-" if chat else "cmpl-"

    def build(
        self,
        prompts: Sequence[EnginePrompt],
        options: Options,
        arrival: Arrival,
        numbers: EventNumbers | None = None,
    ) -> tuple[str, Reply, list[ProxyRequest]]:
        """Returns the response's id, its reply and its requests, ready to be submitted.

        `numbers` give the events of a resumable stream their ids.

        Raises ApiError (400) when a prompt leaves no room, or when the model can't do what the
        options ask for.
        """
        response_id = self._id_prefix + arrival.id_digits
        answers = self.answers(prompts[0], options, response_id) if self._chat else ()
        choices = len(prompts) * options.choices  # as the engine counts them
        progress = self.progress(arrival)
        make: Callable[..., Format] = ChatFormat if self._chat else CompletionFormat
        fmt = make(response_id, int(arrival.unix_s), self._limits.model, options, self._tokenizer)
        reply: Reply = WholeReply(fmt, choices, progress, answers, options.best)
        if options.stream:
            reply = StreamReply(fmt, choices, options, progress, answers, numbers)
        return response_id, reply, self.requests(response_id, reply, prompts, options, arrival)

    def progress(self, arrival: Arrival) -> Progress:
        """Returns the progress of a new reply."""
        return Progress(explain if arrival.trace else None)

    def answers(
        self, prompt: EnginePrompt, options: Options, response_id: str
    ) -> list[ParsedAnswer]:
        """Returns the parser of every choice of a chat; none if all of the text is content."""
        tools = options.tools
        schemas, alone = (None, "") if tools is None else (tools.schemas, tools.alone)
        forced = tools is not None and tools.constraint is not None
        # A constrained answer without a budget begins at once, even if the prompt opens reasoning.
        reasons = options.sampling.constraint is None or options.reasoning_tokens >= 0
        end = prompt.end if reasons else ""
        made = (
            self._parsers.make(schemas, end, forced=forced, alone=alone, reasons=reasons)
            for _ in range(options.choices)
        )
        length = self._parsers.call_id_length
        return [
            ParsedAnswer(parser, options, f"{response_id}/{index}", id_length=length)
            for index, parser in enumerate(made)
            if parser is not None
        ]

    def requests(
        self,
        response_id: str,
        reply: GeneratingReply,
        prompts: Sequence[EnginePrompt],
        options: Options,
        arrival: Arrival,
    ) -> list[ProxyRequest]:
        """Returns the requests, a request per prompt, and adds them to the reply's progress.

        Raises ApiError as `build`.
        """
        requests = []
        for i, prompt in enumerate(prompts):
            request_id = response_id if len(prompts) == 1 else f"{response_id}-{i}"
            request = ProxyRequest(
                spec=self._spec(request_id, prompt, options, arrival),
                prompt_ids=prompt.ids,
                sink=reply,
                choices=self._choices(i * options.choices, prompt, options),
                slo=arrival.slo,
                detailed=options.sampling.logprobs >= 0 or options.return_token_ids,
                echo=self._echo(prompt, options) if options.echo else None,
                arrived_at=arrival.at,
            )
            request.fails_early = arrival.fails_early
            request.trace = arrival.scope
            request.read_at = time.monotonic()
            reply.progress.add(request)
            requests.append(request)
        return requests

    def _choices(self, first: int, prompt: EnginePrompt, options: Options) -> list[Choice]:
        skip = options.skip_special_tokens
        kept = self._parsers.tokens(calls=options.tools is not None) if self._chat else ()
        return [
            Choice(
                index,
                self._tokenizer.detokenizer(prompt.ids, skip_special_tokens=skip, kept=kept),
                options,
                start=len(prompt.text) if options.echo else 0,
            )
            for index in range(first, first + options.choices)
        ]

    def _echo(self, prompt: EnginePrompt, options: Options) -> Echo:
        return Echo(
            text=prompt.text,
            prompt_ids=prompt.ids,
            tokenizer=self._tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            logprobs=options.shown_logprobs,
        )

    def _spec(
        self, request_id: str, prompt: EnginePrompt, options: Options, arrival: Arrival
    ) -> RequestSpec:
        prompt_field = prompt.field or ("messages" if self._chat else "prompt")
        prompt_tokens = prompt.ids.size
        return RequestSpec(
            request_id=request_id,
            proxy=self._proxy,
            prompt_tokens=prompt_tokens,
            sampling=self._sampling.params(prompt, options, prompt_field),
            slo=arrival.slo,
            tenant=arrival.tenant,
            priority=options.priority,
            arrival_unix_s=arrival.unix_s,
            traceparent=arrival.traceparent,
            prefix_hashes=prompt.blocks.hashes,
            prefix_block_tokens=prompt.blocks.block_tokens,
            prefix_root=prompt.blocks.root,
            pooling=options.pooling,
        )
