"""What a long request's home and the holders of its other shards agree on before any pass (KVP).

The wire turns these into protobuf and back. What travels in a pass: `kvp_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachAsk:
    """An owner asks a holder for memory that queries go to, and says where partial results go.

    Pieces of a pass have at most `max_rows` rows. `region` and `offset` are of the owner's, in the
    transport that `agent_metadata` describes.
    """

    owner: Incarnation
    holder: Incarnation
    layout: KvLayout
    max_rows: int
    agent_metadata: bytes
    region: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachGrant:
    """The holder's yes: `slot` names the owner in what it sends; the rest is as in the ask."""

    slot: int
    agent_metadata: bytes
    region: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAsk:
    """An owner asks for pages for positions [start_token, end_token) of a request and its answer.

    Of these [start_token, prompt_tokens) come by a KV transfer, the rest with the passes.
    """

    request_id: str
    attempt: int
    owner: Incarnation
    holder: Incarnation
    layout: KvLayout
    start_token: int
    end_token: int
    prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.start_token

    @property
    def landing_tokens(self) -> int:
        """Of these the first ones, which are of the prompt."""
        return max(0, min(self.end_token, self.prompt_tokens) - self.start_token)
