"""The written form of events and effects, whatever fields they have."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Request, Slo
from millrace.core.scheduler import effects, events, recording, reports
from millrace.core.scheduler.recording import RecordingError, built, plain

EVENTS = typing.get_args(events.Event)
EFFECTS = typing.get_args(effects.Effect)
GIVEN = {
    SpLatency: SpLatency(
        by_sp={1: Latency(b=0.25, c=1e-9), 8: Latency(a=1.5, points=((4, 2.5), (9, 3.25)))}
    )
}


def example(hint, number):
    """A value of a type, every field of it unlike its default."""
    if hint in GIVEN:
        return GIVEN[hint]
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        names = [f.name for f in dataclasses.fields(hint) if f.init]
        return hint(**{name: example(hints[name], number) for name in names})
    if hint is Incarnation:
        return Incarnation(str(next(number)), next(number))
    of = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return example(next(kind for kind in of if kind is not type(None)), number)
    if typing.get_origin(hint) is tuple:
        return tuple(example(kind, number) for kind in (of[0], of[0]) if kind is not Ellipsis)
    if typing.get_origin(hint) is Mapping:
        return {example(of[0], number): example(of[1], number)}
    if issubclass(hint, enum.Enum):
        return list(hint)[1]
    return {str: str, int: int, float: lambda n: n + 0.125, bool: bool}[hint](next(number))


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_comes_back_as_it_was_through_json(kind):
    event = example(kind, itertools.count(11))
    written = recording.plain_event(event)
    again = recording.event_of(json.loads(json.dumps(written, allow_nan=False)))
    assert type(again) is kind
    assert again == event
    assert recording.plain_event(again) == written
    names = [f.name for f in dataclasses.fields(kind)]
    assert written == [kind.__name__, written[1]] and list(written[1]) == names


@pytest.mark.parametrize("kind", typing.get_args(reports.Report))
def test_every_report_comes_back_as_it_was_through_json(kind):
    report = example(kind, itertools.count(11))
    event = events.Reported(instance_id="p0", generation=3, report=report)
    written = json.loads(json.dumps(recording.plain_event(event), allow_nan=False))
    assert recording.event_of(written) == event


@pytest.mark.parametrize("report", [["Mood", {}], {}, "Draining", ["Tick", {}]])
def test_a_report_of_no_known_kind_is_refused(report):
    fields = {"instance_id": "p0", "generation": 1, "report": report}
    with pytest.raises(RecordingError, match=r"is no Reported\.report"):
        recording.event_of(["Reported", fields])


@pytest.mark.parametrize("kind", EFFECTS)
def test_every_effect_has_a_written_form_of_its_own(kind):
    number = itertools.count(11)
    first, second = example(kind, number), example(kind, number)
    written = recording.plain_effects([first, second])
    assert json.loads(json.dumps(written)) == written
    assert [name for name, _ in written] == [kind.__name__] * 2
    assert written[0] != written[1]
    assert built(kind, written[0][1], "") == first


def test_a_request_is_written_as_it_was_submitted():
    request = Request(
        id="r",
        proxy_id="x",
        prompt_tokens=5,
        max_new_tokens=7,
        slo=Slo(ttft_s=0.5),
        arrival_s=3.0,
    )
    assert recording.plain_event(events.Submitted(request=request)) == [
        "Submitted",
        {
            "request": {
                "id": "r",
                "proxy_id": "x",
                "prompt_tokens": 5,
                "max_new_tokens": 7,
                "slo": {"ttft_s": 0.5},
                "arrival_s": 3.0,
            }
        },
    ]


def test_settings_are_written_whole_and_read_again():
    config = SchedulerConfig(tasks_ahead=5, lease_s=9.0)
    head = json.loads(json.dumps(recording.head(config)))
    assert head["scheduler"].keys() == {f.name for f in dataclasses.fields(config)}
    assert recording.config_of(head) == config


@pytest.mark.parametrize(
    "head, message",
    [
        ({}, "it is no recording: its first line has no millrace_recording"),
        ({"millrace_recording": 1}, "millrace_recording is 1; this version reads 3"),
        ({"millrace_recording": 3}, "settings: 'scheduler'"),
        (
            {"millrace_recording": 3, "scheduler": {"tasks_ahead": 0}},
            "settings: scheduler.tasks_ahead is 0; it must be between 1 and 64",
        ),
        ({"millrace_recording": 3, "scheduler": {"mood": 1}}, "scheduler has no field mood"),
    ],
)
def test_a_head_that_can_not_be_read_says_why(head, message):
    with pytest.raises(RecordingError, match=message):
        recording.config_of(head)


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "is no event"),
        (["Order", {}], "is no event"),
        (["Tick", []], "is no event"),
        (["InstanceLeft", {"instance_id": 3, "generation": 1}], "InstanceLeft.instance_id is 3"),
        (["InstanceLeft", {"generation": 1}], "missing 1 required keyword-only argument"),
        (["InstanceLeft", {"instance_id": "a", "generation": True}], "it must be int"),
        (["Submitted", {"request": 4}], "Submitted.request is 4"),
        (["Tick", {"late": 1}], "Tick has no field late"),
    ],
)
def test_an_event_that_can_not_be_read_names_the_field(data, message):
    with pytest.raises(RecordingError, match=message):
        recording.event_of(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Kinds of fields that events may come to have."""

    names: list[str]
    pairs: tuple[tuple[int, float], ...] = ()
    by_size: Mapping[int, float] = dataclasses.field(default_factory=dict)
    limit_s: float = 0.0
    maybe: int | None = None
    either: int | str | None = None


def test_collections_and_infinities_survive():
    odd = Odd(
        names=["a"], pairs=((1, 0.5),), by_size={2: 1.0}, limit_s=math.inf, maybe=0, either=None
    )
    written = plain(odd)
    assert written["limit_s"] == "inf" and written["maybe"] == 0 and "either" not in written
    assert built(Odd, json.loads(json.dumps(written)), "odd") == odd
    assert math.isnan(built(float, plain(math.nan), "x"))


def test_what_has_no_written_form_is_refused():
    with pytest.raises(RecordingError, match="has no written form"):
        plain({"a": {1, 2}})
    with pytest.raises(RecordingError, match=r"odd\.either is 3: .* is more than one type or None"):
        built(Odd, {"names": [], "either": 3}, "odd")
    with pytest.raises(RecordingError, match=r"odd\.pairs"):
        built(Odd, {"names": [], "pairs": [[1, 2.0, 3]]}, "odd")


def test_requests_of_recordings_without_tenants_are_the_default_tenants():
    request = {"id": "a", "proxy_id": "x", "prompt_tokens": 3, "max_new_tokens": 1, "slo": {}}
    written = ["Submitted", {"request": request}]
    event = recording.event_of(written)
    assert event.request.tenant == "default"
    assert recording.plain_event(event) == written
