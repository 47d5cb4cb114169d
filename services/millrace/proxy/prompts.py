"""Turns checked requests into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.parsing.families import Parsers
from millrace.proxy.request.options import Limits, Options
from millrace.proxy.request.validation import CompletionRequest, Conversation, Prompt
from millrace.proxy.text.chat_template import ChatTemplate
from millrace.proxy.text.encoder_process import TokenArray
from millrace.proxy.text.prefix import NO_BLOCKS, PromptBlocks
from millrace.proxy.text.tokenizer import Tokenizer

_END_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """One prompt: int32 [tokens], at least one token; its text if the reply may echo it.

    `end` holds a chat's last characters, which may open the reasoning. `field` is the prompt's path
    in the body, if it is neither the messages of a chat nor the prompt of a completion.
    """

    ids: TokenArray
    text: str = ""
    end: str = ""
    field: str = ""
    blocks: PromptBlocks = NO_BLOCKS


class PromptReader:
    """Renders and tokenises prompts. `template` is None if the model has no chat template."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        parsers: Parsers | None = None,
    ) -> None:
        #: The parsers of the model's answers to a chat.
        self.parsers = parsers or Parsers()
        self._limits = limits
        self._tokenizer = tokenizer
        self._template = template

    async def read_chat(self, request: Conversation) -> EnginePrompt:
        """Returns the prompt. Raises ApiError if messages can't be rendered or have no tokens."""
        if self._template is None:
            raise ApiError(
                400,
                f"The model {self._limits.model!r} has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        arguments = request.template_arguments
        if request.tools is not None:
            if self.parsers.tools == "none":
                raise bad_field(
                    request.tools.field,
                    "the model's chat template has tool calls of no known family; "
                    "proxy.tool_parser can name the family.",
                    "unsupported_parameter",
                )
            arguments = {**arguments, "tools": request.tools.documents}
        text = await self._template.render_async(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            arguments=arguments,
        )
        ids = await self._tokenizer.encode_async(
            text, add_special_tokens=request.add_special_tokens, salt=request.cache_salt
        )
        return _checked(EnginePrompt(ids=ids, end=text[-_END_CHARACTERS:]), "messages")

    async def read_completion(self, request: CompletionRequest) -> list[EnginePrompt]:
        """Returns the request's prompts in order. Raises ApiError for a prompt without tokens."""
        many = len(request.prompts) > 1
        return [
            _checked(await self._read_prompt(prompt, request), f"prompt[{i}]" if many else "prompt")
            for i, prompt in enumerate(request.prompts)
        ]

    async def read_texts(
        self, texts: Sequence[tuple[str, Prompt]], *, add_special_tokens: bool, salt: str
    ) -> list[EnginePrompt]:
        """Returns the prompts of (path, text or token ids), in order.

        Raises ApiError, which names the path, for a text without tokens.
        """
        found = []
        for path, text in texts:
            if isinstance(text, str):
                ids = await self._tokenizer.encode_async(
                    text, add_special_tokens=add_special_tokens, salt=salt
                )
            else:
                ids = np.array(text, dtype=np.int32)
            found.append(_checked(EnginePrompt(ids=ids, field=path), path))
        return found

    def cut(self, prompt: EnginePrompt, options: Options) -> EnginePrompt:
        """Returns the prompt with the tokens that `options.truncation` keeps.

        Raises ApiError naming the field.
        """
        kept = options.kept_tokens(prompt.ids.size, self._limits)
        if options.truncation is None or kept == prompt.ids.size:
            return prompt
        left = options.truncation.side == "left"
        ids = prompt.ids[-kept:] if left else prompt.ids[:kept]
        text = end = ""
        if options.echo:
            skip = options.skip_special_tokens
            text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip)
        if prompt.end:
            last = ids[-_END_CHARACTERS:].tolist()
            end = self._tokenizer.decode(last, skip_special_tokens=False)[-_END_CHARACTERS:]
        return replace(prompt, ids=ids, text=text, end=end)

    async def _read_prompt(self, prompt: Prompt, request: CompletionRequest) -> EnginePrompt:
        if isinstance(prompt, str):
            ids = await self._tokenizer.encode_async(
                prompt,
                add_special_tokens=request.add_special_tokens,
                salt=request.options.cache_salt,
            )
            return EnginePrompt(ids=ids, text=prompt)
        options, text = request.options, ""
        if options.echo:
            text = self._tokenizer.decode(prompt, skip_special_tokens=options.skip_special_tokens)
        return EnginePrompt(ids=np.array(prompt, dtype=np.int32), text=text)


def _checked(prompt: EnginePrompt, field: str) -> EnginePrompt:
    if prompt.ids.size == 0:
        raise bad_field(field, "has no tokens.", "empty_prompt")
    return prompt
