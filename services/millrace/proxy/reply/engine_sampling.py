"""Writes a request's sampling as the engine takes it: in tokens, for one prompt."""

from __future__ import annotations

from millrace.core.request_spec import ReasoningBudget, SamplingParams
from millrace.grammar.reasoning import CHANNEL, END, HARMONY, MARKERS, MESSAGE, START
from millrace.proxy.errors import bad_field, shown
from millrace.proxy.parsing.families import Parsers
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.request.options import Limits, Options
from millrace.proxy.text.tokenizer import Tokenizer

#: The last tokens of a completion's prompt, which may open the reasoning.
_END_TOKENS = 16


class EngineSampling:
    """Writes the sampling parameters of one server's requests."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer, parsers: Parsers) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._parsers = parsers

    def params(self, prompt: EnginePrompt, options: Options, prompt_field: str) -> SamplingParams:
        """Returns the parameters; `prompt_field` is the prompt's path in the body.

        Raises ApiError (400) naming the field that does not fit the prompt or the model.
        """
        sampling = options.sampling
        return SamplingParams(
            max_tokens=options.new_tokens(prompt.ids.size, self._limits, prompt_field),
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            n=options.choices,
            logprobs=sampling.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            constraint=sampling.constraint,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=self._bad_words(options),
            reasoning=self._budget(prompt, options),
        )

    def _bad_words(self, options: Options) -> tuple[tuple[int, ...], ...]:
        """Returns the words' tokens at the beginning of a text and after a space, as vLLM does."""
        found: list[tuple[int, ...]] = []
        for index, word in enumerate(options.bad_words):
            plain, spaced = (self._ids(prefix + word.lstrip()) for prefix in ("", " "))
            if not plain:
                raise bad_field(f"bad_words[{index}]", f"has no tokens, got {shown(word)}.")
            found.append(plain)
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)

    def _budget(self, prompt: EnginePrompt, options: Options) -> ReasoningBudget | None:
        if options.reasoning_tokens < 0:
            return None
        form = self._parsers.reasoning_form
        if form == "none":
            raise bad_field(
                options.reasoning_field,
                "the model's chat template marks reasoning in no known form; "
                "proxy.reasoning_parser can name the form.",
                "unsupported_parameter",
            )
        constrained = options.sampling.constraint is not None
        if constrained:
            self._check_markers(form, options)
        end = prompt.end
        if not end:
            ids = prompt.ids[-_END_TOKENS:].tolist()
            end = self._tokenizer.decode(ids, skip_special_tokens=False)
        return ReasoningBudget(
            max_tokens=options.reasoning_tokens,
            form=form,
            opened=self._parsers.opens_reasoning(end),
            calls=options.tools is not None and not constrained,
        )

    def _check_markers(self, form: str, options: Options) -> None:
        """Raises ApiError unless a token can't be a part of a marker and a part of the answer."""
        markers = (START, CHANNEL, MESSAGE, END) if form == HARMONY else MARKERS[form]
        for marker in markers:
            if len(self._ids(marker)) != 1:
                raise bad_field(
                    options.reasoning_field,
                    f"can't be combined with '{options.constraint_field}': the model's tokenizer "
                    f"has no token for {marker!r}.",
                    "unsupported_parameter",
                )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).tolist())
