"""Chooses the parsers of a model from its chat template, or from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.grammar.reasoning import HARMONY, MARKERS, OPENED_MESSAGE
from millrace.proxy.parsing.combined import Combined
from millrace.proxy.parsing.custom_input import WholeInput
from millrace.proxy.parsing.events import Parser
from millrace.proxy.parsing.harmony import HARMONY_TOKENS, Harmony
from millrace.proxy.parsing.held_calls import HeldCalls, PythonList, XmlCall
from millrace.proxy.parsing.json_calls import (
    DEEPSEEK,
    DEEPSEEK_TOKENS,
    FORCED,
    HERMES,
    LLAMA_JSON,
    MISTRAL,
    JsonCalls,
)
from millrace.proxy.parsing.reasoning import Plain, ReasoningSplit

_JSON = {"hermes": HERMES, "llama3_json": LLAMA_JSON, "mistral": MISTRAL, "deepseek": DEEPSEEK}
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_PYTHON = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
#: The tokens that parsers read. Detokenising keeps them, even if they are special.
_TOKENS: dict[str, tuple[str, ...]] = {
    "hermes": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
    "llama3_json": ("<|python_tag|>",),
    "pythonic": _PYTHON,
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek": DEEPSEEK_TOKENS,
    "harmony": HARMONY_TOKENS,
}
#: What a template of a family contains; the first match counts.
_TOOL_SIGNS = (
    ("harmony", ("<|channel|>",)),
    ("deepseek", DEEPSEEK_TOKENS[:1]),
    ("deepseek", DEEPSEEK_TOKENS[1:2]),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
)
_REASONING_SIGNS = (
    ("harmony", "<|channel|>"),
    ("mistral", "[THINK]"),
    ("think", "<think>"),
    ("think", "</think>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """Makes the parsers of one model. `tools` and `reasoning` name families, or are "none"."""

    tools: str = "none"
    reasoning: str = "none"

    def tokens(self, *, calls: bool) -> tuple[str, ...]:
        """Returns the tokens that the parser reads; `calls`: the client offers tools."""
        tools = _TOKENS.get(self.tools, ()) if calls else ()
        if self.harmony:
            return HARMONY_TOKENS
        return (*tools, *MARKERS.get(self.reasoning, ()))

    @property
    def harmony(self) -> bool:
        """Whether one parser finds both calls and reasoning."""
        return "harmony" in (self.tools, self.reasoning)

    @property
    def reasoning_form(self) -> str:
        """How the model marks reasoning; "none" if it does not, or in an unknown form."""
        return HARMONY if self.harmony else self.reasoning

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so opens the reasoning; of harmony: an assistant's message."""
        start = OPENED_MESSAGE if self.harmony else MARKERS[self.reasoning][0]
        return prompt_end.rstrip().endswith(start)

    @property
    def call_id_length(self) -> int:
        """The length of a call's id; 0: any. Mistral's templates refuse other ids than theirs."""
        return 9 if self.tools == "mistral" else 0

    def make(
        self,
        schemas: Mapping[str, Any] | None,
        prompt_end: str,
        *,
        forced: bool = False,
        alone: str = "",
        reasons: bool = True,
    ) -> Parser | None:
        """Returns the parser of one answer; None if all of the text is content.

        `schemas` holds the parameters of the offered functions; None: no calls are wanted.
        `prompt_end` is the end of the prompt's text, which may open the reasoning. `forced`: a
        constraint forces calls, so the answer has not the family's form: it is the input of the
        custom tool `alone`, or calls. `reasons`: the answer may begin with reasoning.
        """
        if forced:
            calls = WholeInput(alone) if alone else JsonCalls(FORCED, schemas or {})
            return self._after_reasoning(calls, prompt_end) if reasons else calls
        if self.harmony:
            return Harmony(calls=schemas is not None)
        answer = Plain() if schemas is None else self._calls(schemas)
        return self._after_reasoning(answer, prompt_end)

    def _after_reasoning(self, answer: Parser, prompt_end: str) -> Parser | None:
        if self.harmony:
            return Combined(Harmony(calls=False), answer)
        markers = MARKERS.get(self.reasoning)
        if markers is not None:
            opened = self.opens_reasoning(prompt_end)
            return ReasoningSplit(*markers, opened=opened, answer=answer)
        return None if isinstance(answer, Plain) else answer

    def _calls(self, schemas: Mapping[str, Any]) -> Parser:
        if self.tools in _JSON:
            return JsonCalls(_JSON[self.tools], schemas)
        if self.tools == "pythonic":
            return HeldCalls(
                PythonList,
                markers=("<|python_start|>", "<|python_tag|>"),
                bare="[",
                closers=("<|python_end|>",),
                known=schemas.__contains__,
            )
        if self.tools == "qwen3_coder":
            return HeldCalls(
                lambda: XmlCall(schemas),
                markers=("<tool_call>",),
                kept=("<function=",),
                closers=("</tool_call>",),
            )
        return Plain()


def choose_parsers(
    template: str | None, *, tools: str = "auto", reasoning: str = "auto"
) -> Parsers:
    """Returns the parsers of a model with this chat template; settings other than auto win."""
    source = template or ""
    if tools == "auto":
        tools = "none"
        if "tools" in source:
            found = (name for name, signs in _TOOL_SIGNS if all(s in source for s in signs))
            tools = next(found, "none")
    if reasoning == "auto":
        reasoning = next((name for name, sign in _REASONING_SIGNS if sign in source), "none")
    return Parsers(tools=tools, reasoning=reasoning)
