"""The agreement between a KV owner and the KVP workers of a long request before any pass (KVP).

The wire turns these messages into protobuf and back. `kvp_pass` has the messages of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachAsk:
    """A KV owner asks a KVP worker for memory for queries, and says where partial results go.

    Pieces of a pass have at most `max_rows` rows. `region` and `offset` are of the owner's memory,
    in the transport that `agent_metadata` describes.
    """

    owner: Incarnation
    worker: Incarnation
    layout: KvLayout
    max_rows: int
    agent_metadata: bytes
    region: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachGrant:
    """The KVP worker's grant: `slot` names the owner in the worker's messages; the rest is as in
    the ask.
    """

    slot: int
    agent_metadata: bytes
    region: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAsk:
    """A KV owner asks for pages for positions [start_token, end_token) of a request and its answer.

    Tokens [start_token, prompt_tokens) come by a KV transfer, the rest with the passes.
    """

    request_id: str
    attempt: int
    owner: Incarnation
    worker: Incarnation
    layout: KvLayout
    start_token: int
    end_token: int
    prompt_tokens: int
    traceparent: str = ""  # of the request, as its arrival
    arrival_unix_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.start_token

    @property
    def landing_tokens(self) -> int:
        """Returns how many of these tokens are of the prompt and come by a KV transfer."""
        return max(0, min(self.end_token, self.prompt_tokens) - self.start_token)
