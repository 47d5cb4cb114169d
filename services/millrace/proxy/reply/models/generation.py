"""The models of the gateway's answers, from which its OpenAPI document is made.

`formats` and the routes write the answers themselves: a model would cost a second copy of each.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from millrace.proxy.reply.models.explained import Explanation, RequestExplanation


class ApiErrorBody(TypedDict):
    """What went wrong; `param` names the field of the body."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """The answer to a request that is refused or fails."""

    error: ApiErrorBody


class Model(TypedDict):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(TypedDict):
    """All served models."""

    object: str
    data: list[Model]


class Status(TypedDict):
    """The state of the process."""

    status: str


class Text(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(TypedDict):
    """The fields of the model's tokenizer_config.json, and these."""

    tokenizer_class: str
    chat_template: str | None


class Tokens(TypedDict):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class WeightsInForce(TypedDict):
    """The weights of all SLO classes and of all tenants."""

    classes: dict[str, float]
    tenants: dict[str, float]


class SchedulerSettings(TypedDict):
    """The scheduler's settings, and the policies that it knows."""

    policy: str
    preemption: str
    planner: str
    improvement_rate: float
    weights: WeightsInForce
    policies: list[str]


class LimitLeft(TypedDict):
    """What a limit leaves now; it is whole again in `reset_s`."""

    meter: str
    limit: int
    used: int
    left: int
    reset_s: float


class TenantKey(TypedDict):
    """A key: the first digits of its digest, and its own access inside its tenant's."""

    name: str
    sha256: str
    models: list[str]
    slo_classes: list[str]
    limits: dict[str, int]
    left: list[LimitLeft]


class Tenant(TypedDict):
    """A tenant: its access, and what its limits leave. Empty lists of names allow all.

    `stored`: the store has a table of it.
    """

    name: str
    weight: float
    stored: bool
    models: list[str]
    slo_classes: list[str]
    limits: dict[str, int]
    left: list[LimitLeft]
    keys: list[TenantKey]


class Tenants(TypedDict):
    """All tenants, of the settings and of the file of keys."""

    tenants: list[Tenant]


class StoredTenant(TypedDict):
    """Whether the store has the tenant now."""

    name: str
    stored: bool


class ServedModels(TypedDict):
    """The models' own names, the first model first."""

    models: list[str]


class PolicyChange(TypedDict):
    """The policy in force, the policy before, and after a change of weights all weights."""

    policy: str
    before: str
    weights: NotRequired[WeightsInForce]


class ImprovementRate(TypedDict):
    """The improvement rate in force."""

    improvement_rate: float


class ImprovementRateChange(ImprovementRate):
    """The improvement rate in force, and the rate before."""

    before: float


class PromptTokens(TypedDict):
    """Tokens of prompts whose KV came from the prefix cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts, summed over the prompts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class LikelyToken(TypedDict):
    """A token, its log-probability, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    """The log-probabilities of a chat's choice."""

    content: list[ChosenToken]
    refusal: None


class TextLogprobs(TypedDict):
    """The log-probabilities of a completion's choice, by position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, Any] | None] | None
    text_offset: list[int]


class CalledFunction(TypedDict):
    """The name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


class CalledCustomTool(TypedDict):
    """The name of a called custom tool, and its input."""

    name: str
    input: str


class AnsweredCustomCall(TypedDict):
    """A call of a custom tool by the assistant."""

    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AnsweredToolCall(TypedDict):
    """A call of a function by the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The assistant's message. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredToolCall | AnsweredCustomCall]]
    function_call: NotRequired[CalledFunction]


class ChatChoice(TypedDict):
    """One of the answers to a conversation."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class PromptToken(TypedDict):
    """A token at a position of the prompt; the rank of an unlikely one is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


class TextChoice(TypedDict):
    """One of the completions of a text."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


class Span(TypedDict):
    """A part of a request's time, in seconds since its arrival."""

    name: str
    instance_id: str
    start_s: float
    end_s: float
    attributes: dict[str, str]


class Waterfall(TypedDict):
    """Where the time of a request went; `more`: that of the request's other prompts."""

    request_id: str
    arrival_unix_s: float
    spans: list[Span]
    trace_id: NotRequired[str]
    predicted_ttft_ms: float
    ttft_ms: NotRequired[float]
    more: NotRequired[list[Waterfall]]


class RequestTrace(Waterfall):
    """The same of one request that is open, or ended lately; `error`: why it failed."""

    object: Literal["millrace.trace"]
    error: NotRequired[str]


class Completed(TypedDict):
    """The fields of both completion endpoints' answers."""

    id: str
    created: int
    model: str
    usage: Usage
    millrace: NotRequired[Waterfall]


class ChatCompletion(Completed):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


class Completion(Completed):
    """The completion of texts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class RequestState(TypedDict):
    """How far a request is. Times are seconds; null: unknown, or over."""

    object: Literal["millrace.request"]
    id: str
    state: str
    created: int
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    queue_place: int | None
    left_s: float | None
    predicted_ttft_s: float | None


#: Every answer that the document names.
ANSWERS: tuple[Any, ...] = (
    ChatCompletion,
    Completion,
    Error,
    Explanation,
    ImprovementRate,
    ImprovementRateChange,
    Model,
    Models,
    PolicyChange,
    RequestExplanation,
    RequestState,
    RequestTrace,
    SchedulerSettings,
    ServedModels,
    Status,
    StoredTenant,
    Tenants,
    Text,
    TokenizerInfo,
    Tokens,
)
