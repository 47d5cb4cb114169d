"""Follows an answer through its reasoning, and forces the end when the budget is used up.

The text of the tokens decides, as in the proxy's parsers: a marker counts however the model writes
it. Forced tokens spell the marker exactly. All state follows from the answer's tokens, so a resumed
answer has the state of one that was never disturbed.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from millrace.core.request_spec import ReasoningBudget
from millrace.grammar import reasoning as forms
from millrace.grammar.vocabulary import Vocabulary

Ids = tuple[int, ...]

_CHANNEL: Final = re.compile(rb"<\|channel\|>\s*(\w+)")


class Reasoning(Protocol):
    """The place of one answer in its reasoning.

    `answers`: the constraint decides about the next token. `only`: the tokens that may come next;
    none: any. `also`: a token that the constraint need not allow. `barred`: tokens that may not
    come next.
    """

    answers: bool
    only: Ids
    also: Ids
    barred: Ids

    def append(self, token_id: int) -> bool:
        """Moves past a token; returns whether the constraint has to allow it."""


def reasoning_of(
    budget: ReasoningBudget, vocabulary: Vocabulary, stop_ids: Ids, *, constrained: bool
) -> Reasoning:
    """Returns the state of an answer without tokens.

    `constrained`: a constraint follows the reasoning, so `stop_ids` may not end it. Raises
    GrammarError if the tokenizer can't be read.
    """
    barred = stop_ids if constrained else ()
    if budget.form == forms.HARMONY:
        return Channels(budget, vocabulary, barred, constrained=constrained)
    return Marked(budget, vocabulary, barred, constrained=constrained)


class Marked:
    """Reasoning between two markers at the beginning of the answer."""

    def __init__(
        self, budget: ReasoningBudget, vocabulary: Vocabulary, stop_ids: Ids, *, constrained: bool
    ) -> None:
        start, end = forms.MARKERS[budget.form]
        self._vocabulary = vocabulary
        self._start, self._end = start.encode(), end.encode()
        self._end_ids = vocabulary.ids(end)
        self._left = budget.max_tokens
        self._constrained = constrained
        self._stop_ids = stop_ids
        self._text = b""  # of the beginning, or the end of the reasoning so far
        self._begins = not budget.opened
        self._forced: Ids = ()
        self.answers = self._begins
        self.only: Ids = ()
        self.also: Ids = vocabulary.ids(start)[:1] if constrained and self._begins else ()
        self.barred: Ids = ()
        if not self._begins:
            self._go_on()

    def append(self, token_id: int) -> bool:
        if not self._begins and self.answers:
            return True
        text = self._vocabulary.token(token_id)
        if self._begins:
            return self._begin(text)
        if self._forced:
            self._forced = self._forced[1:]
            self.only = self._forced[:1]
            if not self._forced:
                self._answer()
            return False
        self._left -= 1
        self._text += text
        self._go_on()
        return False

    def _begin(self, text: bytes) -> bool:
        """Takes a token of the answer's beginning, which may still become the first marker."""
        self._text += text
        self.also = ()
        begun = self._text.lstrip()
        few = len(self._text) - len(begun) <= forms.MOST_HEADER
        if few and begun.startswith(self._start):
            self._begins = self.answers = False
            self._text = begun[len(self._start) :]
            self._left -= bool(self._text)
            self._go_on()
        elif self._constrained or not (few and self._start.startswith(begun)):
            self._begins = False  # it is the answer
        return not self._begins and self.answers

    def _go_on(self) -> None:
        """Looks for the end of the reasoning, and for the end of the budget."""
        if self._end in self._text:
            self._answer()
            return
        self._text = self._text[1 - len(self._end) :]
        if self._left <= 0:
            self._forced, self.barred = self._end_ids, ()
            self.only = self._forced[:1]
        elif self._constrained:
            self.barred = self._stop_ids + self._written_ends()

    def _written_ends(self) -> Ids:
        """Returns tokens that would end the reasoning together with a part of the answer."""
        found = set(self._vocabulary.with_part(self._end))
        for length in range(1, len(self._end)):
            if self._text.endswith(self._end[:length]):
                found.update(self._vocabulary.with_prefix(self._end[length:]))
        return tuple(found.difference(self._end_ids))

    def _answer(self) -> None:
        self.answers = True
        self._text = b""
        self._forced = self.only = self.barred = ()


class Channels:
    """Reasoning in messages on a channel of its own (harmony). The budget is that of all of them.

    A used budget ends the message; after it no header names the channel again.
    """

    def __init__(
        self, budget: ReasoningBudget, vocabulary: Vocabulary, stop_ids: Ids, *, constrained: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._calls = budget.calls
        self._left = budget.max_tokens
        self._constrained = constrained
        self._buffer = b""
        self._in_header = self._reasons = False
        self._markers = tuple(m.encode() for m in (*forms.OPENERS, *forms.CLOSERS))
        answer = f"{forms.OPENED_MESSAGE}{forms.CHANNEL}"
        if constrained or not budget.calls:
            answer += forms.FINAL + forms.MESSAGE
        self._next_ids = vocabulary.ids(answer)
        self._end_ids = vocabulary.ids(forms.END)
        channels = (forms.FINAL, *((forms.COMMENTARY,) if budget.calls else ()))
        self._channel_ids = tuple(vocabulary.ids(name)[0] for name in channels)
        others = set().union(*(vocabulary.ids(m) for m in (*forms.OPENERS, *forms.CLOSERS)))
        self._kept = (*stop_ids, *others.difference(self._end_ids))
        self._forced: Ids = ()
        self.answers = constrained and not budget.opened
        self.only: Ids = ()
        self.also: Ids = ()
        self.barred: Ids = ()
        if constrained and budget.opened:
            channel = forms.ANALYSIS if budget.max_tokens else forms.FINAL
            self._force(vocabulary.ids(f"{forms.CHANNEL}{channel}{forms.MESSAGE}"))

    def append(self, token_id: int) -> bool:
        if self.answers:
            return True
        self._forced = self._forced[1:]
        reasoned = self._reasons and not self._in_header
        self._buffer += self._vocabulary.token(token_id)
        while self._moves():
            pass
        if reasoned and self._reasons:
            self._left -= 1
        self._limit(ended=reasoned and not self._reasons)
        return False

    def _moves(self) -> bool:
        """Reads the buffer up to the next marker; returns False if there is none in it."""
        if self._in_header:
            header, found, rest = self._buffer.partition(forms.MESSAGE.encode())
            if not found and len(header) < forms.MOST_HEADER:
                return False
            channel = _CHANNEL.search(header)
            calls = self._calls and b"to=" in header
            named = channel is not None and channel[1] == forms.ANALYSIS.encode()
            self._reasons = named and bool(found) and not calls
            self._in_header, self._buffer = False, rest
            return True
        places = [(self._buffer.find(m), m) for m in self._markers if m in self._buffer]
        if not places:
            self._buffer = self._buffer[1 - max(map(len, self._markers)) :]
            return False
        at, marker = min(places)
        self._reasons = False
        self._in_header = marker.decode() in forms.OPENERS
        self._buffer = self._buffer[at if self._in_header else at + len(marker) :]
        return True

    def _limit(self, *, ended: bool) -> None:
        """Decides what may come next. `ended`: the last token ended a message of reasoning."""
        self.only, self.barred = self._forced[:1], ()
        if self._forced:
            return
        if self._constrained:
            self._limit_constrained(ended=ended)
        elif self._reasons and self._left <= 0:
            self._force(self._end_ids + self._next_ids)
        elif self._in_header and self._left <= 0:
            opened = self._buffer.endswith(forms.CHANNEL.encode())
            self.only = self._channel_ids if opened else ()

    def _limit_constrained(self, *, ended: bool) -> None:
        if ended:
            self._force(self._next_ids)
        elif not self._reasons:
            self.answers = True
        elif self._left <= 0:
            self._force(self._end_ids + self._next_ids)
        else:
            self.barred = self._kept

    def _force(self, ids: Ids) -> None:
        self._forced, self.only = ids, ids[:1]
