"""Events as lines of text for a `Bench`, and effects as lines of text."""

from __future__ import annotations

import ast
import itertools
import math
import shlex
import textwrap
from collections.abc import Iterable
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.instance.standstill import Standstill
from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.fleet.instances import DecodeInstance, PrefillInstance
from support.core_events import Bench, groups_of, instance
from support.prefill_fleet import scripted

#: The counts of a machine; a count that rises is written below the effects.
COUNTS = ("ignored", "preemptions", "release_timeouts", "stalled")

#: Hashes of a prompt's blocks.
BLOCKS = tuple(range(1000, 1100))


class Narrator:
    """One machine, driven by lines. `tell(line)` returns the lines of its effects."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.plans: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def tell(self, line: str) -> list[str]:
        given = line.removeprefix("given ")
        said = self._play(given)
        return said if given == line else []

    def _play(self, line: str) -> list[str]:
        found: list[effects.Effect] = []
        shown: list[str] = []
        before = [getattr(self.bench.machine, name) for name in COUNTS]
        for verb, *words in split(line):
            if verb == "show":
                shown += [self.shown(word) for word in words]
            elif verb == "scheduler":
                self.bench = Bench(config=SchedulerConfig(**arguments(words)[1]))
                self.plans = {}
            else:
                given, named = arguments(words)
                speaker = self if hasattr(self, verb) else self.bench
                found += getattr(speaker, verb)(*given, **named)
        rose = [
            f"{name} +{now - was}"
            for name, was in zip(COUNTS, before, strict=True)
            if (now := getattr(self.bench.machine, name)) > was
        ]
        return [*written(found), *rose, *shown]

    # ---- events of more than a bench's one call

    def joins(self, *names: str, sp: Any = None, step: Any = None, **card: Any) -> list:
        """`sp`: degrees of groups, a group of n being n times as fast. `step`: seconds of one."""
        if sp is not None:
            card["latency"] = groups_of(*(sp if isinstance(sp, tuple) else (sp,)))
        if step is not None:
            card["decode_step"] = DecodeStepTime.of(step)
        return [e for name in names for e in self.bench.step(instance(name, **card))]

    def at(self, now_s: float) -> list:
        self.bench.now_s = now_s
        return []

    def caches(self, name: str, blocks: int) -> list:
        """The instance's prefix cache has so many first blocks of `BLOCKS`."""
        whole = reports.CachedBlocks(whole=True, added=BLOCKS[:blocks])
        return self.bench.report(name, whole)

    def submit(self, *words: Any, prefix: Any = (), **fields: Any) -> list:
        """`prefix`: hashes of blocks, or how many of `BLOCKS` the prompt begins with."""
        hashes = BLOCKS[:prefix] if isinstance(prefix, int) else prefix
        return self.bench.submit(*words, prefix=hashes, **fields)

    def plan(self, *chunks: str) -> list:
        """Cuts prompts of as many tokens as these so from now on: `100@p0 200@p0,p1`."""
        (pool,) = self.bench.machine.cluster.pools.values()
        order = list(pool.prefill)
        planned = []
        for chunk in chunks:
            tokens, _, members = chunk.partition("@")
            planned.append((int(tokens), tuple(order.index(m) for m in members.split(","))))
        self.plans[sum(tokens for tokens, _ in planned)] = planned
        scripted(self.bench, self.plans)
        return []

    def still(self, name: str, *prepared: str, claimed: str = "") -> list:
        """Sends a heartbeat of an instance that has prepared these and computes nothing."""
        waits = Standstill(prepared=prepared, claimed=claimed, waits_for=f"START of {name}")
        return self.bench.heartbeat(name, standstill=waits if prepared else None)

    def proxy_left(self, name: str) -> list:
        return self.bench.step(events.ProxyLeft(proxy_id=name))

    def policy(self, name: str) -> list:
        return self.bench.step(events.PolicyChanged(policy=name))

    # ---- the present state

    def shown(self, name: str) -> str:
        machine = self.bench.machine
        if name == "machine":
            line = f"{machine.queued} queued, {number(machine.queued_s)} s"
            return f"machine: {line}, {machine.rounds} rounds"
        if name == "breakers":
            states = {of: machine.breakers.state(of) for of in machine.cluster.instances}
            found = [f"{of} {state}" for of, state in states.items() if state != "closed"]
            return f"breakers: {', '.join(found) or 'all closed'}"
        if (one := machine.cluster.instances.get(name)) is not None:
            return of_instance(one)
        request = machine.requests.get(name)
        return f"{name}: over" if request is None else self.of_request(request)

    def of_request(self, one: LiveRequest) -> str:
        left_s, work_s = one.remaining_s(self.bench.now_s), one.remaining_work_s(self.bench.now_s)
        of_attempts = f"attempt {one.attempt} ({one.attempts} counted)"
        at_decode = f"kept {one.kept_tokens}, landed {one.landed_tokens}"
        left = f"left {number(left_s)} s, work {number(work_s)} s"
        return f"{one.id}: {one.state.value} @ {one.decode_id}, {of_attempts}, {at_decode}, {left}"


def split(line: str) -> Iterable[list[str]]:
    """Splits a line into its commands, which `;` parts, as words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    for is_end, words in itertools.groupby(lexer, lambda word: word == ";"):
        if not is_end:
            yield list(words)


def arguments(words: Iterable[str]) -> tuple[list[Any], dict[str, Any]]:
    given, named = [], {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            named[name] = literal(value)
        else:
            given.append(literal(word))
    return given, named


def literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def number(value: float) -> str:
    return f"{value:.4g}"


# ---- effects

Phrase = tuple[str, str, str]  # the effect, its instances, and the rest


def written(found: Iterable[effects.Effect]) -> list[str]:
    """Writes one line for successive effects of one subject: a request, or an instance's queue."""
    lines = []
    for subject, some in itertools.groupby(found, _subject):
        lines += textwrap.wrap(
            f"{subject}: " + "; ".join(_merged([_phrase(effect) for effect in some])),
            width=98,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _subject(effect: effects.Effect) -> str:
    if isinstance(effect, effects.Order):
        return effect.instance_id
    return "stalled" if isinstance(effect, effects.Stalled) else effect.request_id


def _merged(phrases: list[Phrase]) -> Iterable[str]:
    """Writes one phrase for equal effects at several instances.

    A reason or KV owner is named once.
    """
    said: set[str] = set()
    for (verb, rest), same in itertools.groupby(phrases, lambda phrase: (phrase[0], phrase[2])):
        told = ",".join(target for _, target, _ in same)
        yield " ".join(word for word in (verb, told, "" if rest in said else rest) if word)
        said |= {rest} if rest.startswith(("(", "@")) else set()
        said |= {f"@ {told}"} if verb == "place" else set()


def _phrase(effect: effects.Effect) -> Phrase:
    match effect:
        case effects.Place() | effects.Refuse() | effects.Fail() | effects.Suspect():
            return _to_proxy(effect)
        case effects.AdmitDecode():
            shards = [f"{s.start_token}-{s.end_token}@{s.worker_id}" for s in effect.shards]
            kept = [f"kept={effect.kept_tokens}"] if effect.kept_tokens else []
            return "admit", effect.instance_id, " ".join(_attempt(effect) + kept + shards)
        case effects.RunPrefill():
            shards = [f"in {len(effect.shards)} shards"] if effect.shards else []
            rest = [
                *map(_chunk, effect.chunks),
                f"-> {effect.decode_id or 'its proxy'}",
                *shards,
                *_attempt(effect),
            ]
            return "run", effect.instance_id, " ".join(rest)
        case effects.Order():
            entries = ["+".join(map(_ref, entry)) for entry in effect.queue]
            return "queue", "", " ".join(entries) or "nothing"
        case effects.CancelOn():
            return "cancel", effect.instance_id, f"({effect.reason})"
        case effects.Record():
            decode = f"@ {effect.decode_id}" if effect.decode_id else ""
            return (
                effect.state.value,
                "",
                decode + (f" kv={effect.kv_tokens}" * (effect.kv_tokens > 0)),
            )
        case effects.Stalled():
            waits = ", ".join(f"{name} waits for {what}" for name, what in effect.waits)
            return " ".join(effect.request_ids), "", f"({waits})"


def _to_proxy(effect: effects.Place | effects.Refuse | effects.Fail | effects.Suspect) -> Phrase:
    match effect:
        case effects.Place():
            return "place", effect.decode_id, f"ttft={number(effect.predicted_ttft_s)}"
        case effects.Refuse():
            after = f", retry after {number(effect.retry_after_s)} s"
            verb = f"refuse {effect.code}{after if effect.retry_after_s else ''}"
            return verb, "", f"({effect.message})"
        case effects.Fail():
            how = " unread" if effect.prompt_unread else " resumable" * effect.resumable
            how += " quarantined" * effect.quarantined
            return f"fail{how}", "", f"({effect.message})"
        case effects.Suspect():
            lost = ", ".join(f"{one.id}@{one.generation}" for one in effect.deaths)
            return "suspect", "", f"({lost})"


def _attempt(effect: effects.AdmitDecode | effects.RunPrefill) -> list[str]:
    return [] if effect.attempt == 1 else [f"#{effect.attempt}"]


def _chunk(chunk: Chunk) -> str:
    end = chunk.start_token + chunk.num_tokens
    return f"{chunk.start_token}-{end}@{','.join(chunk.instance_ids)}"


def _ref(ref: effects.ChunkRef) -> str:
    return ref.request_id + (f".{ref.chunk_index}" if ref.chunk_index else "")


def of_instance(one: Any) -> str:
    """Returns what it holds in pages, and what it has free."""
    held = ", ".join(f"{name} {holding.pages}" for name, holding in one.holdings.items())
    parts = [f"holds {held or 'nothing'}"]
    if isinstance(one, PrefillInstance):
        names = [
            "+".join(r.id for r in task.requests)
            + (f".{task.chunk.index}" if task.chunk.index else "")
            + ("!" if task.chosen else "")
            for task in one.queue
        ]
        parts += [f"{one.free_pages} free", f"queue {' '.join(names) or 'empty'}"]
    else:
        parts.append(f"{one.open_pages} open")
    if isinstance(one, DecodeInstance):
        parts.append(f"batch {one.batch_size} of {one.sequences}, context {one.context_tokens}")
        parts += [f"tbt {one.tightest_tbt_s}"] if one.tightest_tbt_s < math.inf else []
    return f"{one.id}: {', '.join(parts)}{', draining' if one.draining else ''}"
