"""Compiles constraints for one model's vocabulary, and follows an answer through its grammar."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from millrace.core.arithmetic import ceil_div
from millrace.core.request_spec import Constraint, SamplingParams
from millrace.grammar.source import GrammarError, grammar_of
from millrace.grammar.vocabulary import Vocabulary

#: One bit a token, lowest bit first: uint32 [ceil(vocabulary / 32)].
Mask = npt.NDArray[np.uint32]

_MOST_KEPT: Final = 256
# Handing a mask to a thread and back takes about 50 us.
_WORTH_A_THREAD_S: Final = 1e-4
# The library's error where neither a token nor the end may follow.
_NO_TEXT: Final = "NoExtensionBias"
# The library ends a compilation or a step that needs more; a lexer state takes 1 to 2 kB.
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class Matcher:
    """The place of one answer in its grammar. `error` says why the answer can't continue.

    Not thread-safe. A mask may be computed on a thread while its caller does other work: the
    library releases the GIL.
    """

    __slots__ = ("_found", "_mask", "_took_s", "_words", "error")

    def __init__(self, found: LLMatcher | None, words: int, error: str = "") -> None:
        """`words`: of a mask."""
        self._found = found
        self._words = words
        self._mask: Future[Mask] | None = None
        self._took_s = math.inf  # of the last mask
        self.error = error

    def consume(self, token_id: int) -> None:
        """Moves past a token of the answer; sets `error` if the grammar does not allow it."""
        if self._mask is not None:
            self.mask()
        if self._found is not None and not self.error and not self._found.consume_token(token_id):
            self.error = f"the answer left its grammar: {self._found.get_error()}"

    def begin_mask(self) -> None:
        """Begins to compute the next `mask` on a thread, if the last one took long enough."""
        if self._mask is None and self._took_s > _WORTH_A_THREAD_S:
            self._mask = _threads().submit(self._computed)

    def mask(self) -> Mask:
        """Returns the tokens that may come next; none of them after an error.

        Where the answer may end they include the end-of-sequence ids.
        """
        begun, self._mask = self._mask, None
        return self._computed() if begun is None else begun.result()

    def _computed(self) -> Mask:
        mask = np.zeros(self._words, dtype=np.uint32)
        if self._found is not None and not self.error:
            begun_s = time.perf_counter()
            self._found.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._took_s = time.perf_counter() - begun_s
            if self._found.is_error():
                self.error = f"the grammar is too complex: {self._found.get_error()}"
        return mask


def _check_first_token(found: LLMatcher) -> None:
    """Raises GrammarError for a grammar that no answer can begin: one that contains itself."""
    found.compute_bitmask()
    if not found.is_error():
        return
    reason = found.get_error().partition("\n")[0]
    raise GrammarError("no text fits it" if reason == _NO_TEXT else f"its first token: {reason}")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="masks")


class Grammars:
    """Compiles each constraint once, on a thread of its own, and keeps the last 256 of them.

    `vocab_size` counts the model's logits, `eos_ids` end a sequence. The tokenizer of `folder` is
    read at the first constraint.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocabulary = Vocabulary(folder, vocab_size, eos_ids)
        self._words = ceil_div(vocab_size, 32)
        self._kept: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, sampling: SamplingParams) -> None:
        """Begins to prepare what an answer needs, so that its first token waits less."""
        if sampling.constraint is not None:
            self.prepare(sampling.constraint)
        elif sampling.reasoning is not None:
            self._thread.submit(lambda: self.vocabulary.tokenizer)

    def prepare(self, constraint: Constraint) -> Future[LLMatcher]:
        """Begins to compile a constraint, unless it is known. The future may raise GrammarError."""
        with self._lock:
            future = self._kept.get(constraint)
            if future is None:
                future = self._kept[constraint] = self._thread.submit(self._compile, constraint)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(constraint)
            return future

    def matcher(self, constraint: Constraint) -> Matcher:
        """Returns the matcher of an answer without tokens.

        Waits for the compilation. A constraint that can't be compiled gives a matcher with `error`.
        """
        try:
            return Matcher(self.prepare(constraint).result().deep_copy(), self._words)
        except GrammarError as error:
            return Matcher(None, self._words, str(error))

    def close(self) -> None:
        """Ends the thread once it has compiled what was asked for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        compiled = LLMatcher(
            self.vocabulary.tokenizer, grammar_of(constraint), log_level=0, limits=_LIMITS
        )
        if compiled.is_error():
            raise GrammarError(compiled.get_error().strip())
        _check_first_token(compiled.deep_copy())
        return compiled

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammars")
