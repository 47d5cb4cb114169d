"""Decides how often an instance reports how far a prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: The most reports of one prompt: a scheduler takes each of them as a message.
MOST_REPORTS: Final = 64


@dataclass(slots=True)
class PromptSteps:
    """The reports of one prompt. The end of the prompt has a report of its own kind."""

    told_tokens: int = 0

    def is_due(self, done_tokens: int, prompt_tokens: int) -> bool:
        """Returns whether to report `done_tokens` of the prompt now; then counts them as told."""
        step = done_tokens - self.told_tokens
        if done_tokens >= prompt_tokens or step * MOST_REPORTS < prompt_tokens:
            return False
        self.told_tokens = done_tokens
        return True
