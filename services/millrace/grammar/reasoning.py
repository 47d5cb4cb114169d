"""How models mark the reasoning before their answers: the texts of the markers, by form."""

from __future__ import annotations

from typing import Final

#: Start and end of the reasoning, by form. It comes first in the answer, or the prompt opens it.
MARKERS: Final = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

#: The form of gpt-oss (OpenAI's harmony format): messages with a header, on channels.
HARMONY: Final = "harmony"
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
OPENERS: Final = (START, CHANNEL)
CLOSERS: Final = (END, CALL, RETURN)
#: The channel of reasoning, of answers, and of calls and what is said before them.
ANALYSIS, FINAL, COMMENTARY = "analysis", "final", "commentary"
#: The prompt ends so if the model writes the next header.
OPENED_MESSAGE: Final = f"{START}assistant"
#: The most characters of a header, and of spaces before a marker.
MOST_HEADER: Final = 512
