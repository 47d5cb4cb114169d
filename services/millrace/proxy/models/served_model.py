"""One model of the proxy: how its text is read and written, and the fleet that computes it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millrace.core.config import Config
from millrace.core.config.models import ModelConfig
from millrace.grammar.matcher import Grammars
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.model_card import ModelCard, read_model_card
from millrace.proxy.parsing.families import choose_parsers
from millrace.proxy.prompts import PromptReader
from millrace.proxy.reply.builder import Builder
from millrace.proxy.request.options import Limits
from millrace.proxy.request.pooled import PooledBodies
from millrace.proxy.request.validation import Bodies
from millrace.proxy.text.chat_template import ChatTemplate
from millrace.proxy.text.prefix import PromptHasher
from millrace.proxy.text.tokenizer import Tokenizer

#: Makes the gateway of a model with this name, these settings and this scheduler's address.
MakeGateway = Callable[[str, Config, str], Gateway]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """The parts that every model has for itself. `created` is Unix time, s."""

    limits: Limits
    bodies: Bodies
    pooled: PooledBodies
    tokenizer: Tokenizer
    grammars: Grammars
    prompts: PromptReader
    hasher: PromptHasher
    gateway: Gateway
    scheduler: str
    #: The JSON of /tokenizer_info.
    tokenizer_info: bytes
    created: int = field(default_factory=lambda: time.time_ns() // 10**9)

    @property
    def name(self) -> str:
        return self.limits.model

    def builder(self, *, chat: bool) -> Builder:
        """Returns a maker of requests and replies of one of the two APIs."""
        return Builder(
            self.limits,
            self.tokenizer,
            self.gateway.incarnation,
            self.prompts.parsers,
            chat=chat,
        )

    async def close(self) -> None:
        """Cancels the open requests and frees the parts."""
        await self.gateway.close()
        self.tokenizer.close()
        self.grammars.close()


def read_model(model: ModelConfig, of_proxy: Config, make_gateway: MakeGateway) -> ServedModel:
    """Reads the model's small files, and makes its parts. Raises ModelError, ConfigError."""
    config = model.config(of_proxy)
    card = read_model_card(model.model, config.engine.max_context_tokens)
    embedding = card.embedding
    if config.proxy.pooling != "auto":
        embedding = replace(embedding, pooling=config.proxy.pooling)
    limits = Limits(
        model=model.name or card.folder.resolve().name,
        vocab_size=card.vocab_size,
        context_tokens=card.context_tokens,
        eos_token_ids=card.eos_token_ids,
        defaults=card.defaults,
        embedding=embedding,
        config=config.proxy,
    )
    parsers = choose_parsers(
        card.chat_template,
        tools=config.proxy.tool_parser,
        reasoning=config.proxy.reasoning_parser,
    )
    template = None
    if card.chat_template is not None:
        template = ChatTemplate(card.chat_template, card.special_tokens)
    tokenizer = Tokenizer(card)
    return ServedModel(
        limits=limits,
        bodies=Bodies(limits),
        pooled=PooledBodies(limits),
        tokenizer=tokenizer,
        grammars=Grammars(card.folder, card.vocab_size, card.eos_token_ids),
        prompts=PromptReader(limits, tokenizer, template, parsers),
        hasher=PromptHasher(config.engine),
        gateway=make_gateway(limits.model, config, model.scheduler),
        scheduler=model.scheduler,
        tokenizer_info=tokenizer_info(card),
    )


def tokenizer_info(card: ModelCard) -> bytes:
    """Returns the tokenizer's settings as vLLM shows them, with the chat template in force."""
    found = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **card.tokenizer_config,
        **card.special_tokens,
        "chat_template": card.chat_template,
    }
    return json.dumps(found).encode()  # orjson writes no integer above 64 bits: model_max_length
