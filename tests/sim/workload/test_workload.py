"""Traces, lengths and arrivals. The rows written here were made up; their formats are the public
ones that `millrace.sim.workload.traces` names.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.sim.workload.traces import TraceRow, cut_window, read_trace
from millrace.sim.workload.workload import SloClass, WorkloadOptions, parse_lengths, plan
from support.recorded_runs import recorded_run

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.5000000,4808,10\r\n"
    "2023-11-17 00:00:02.7500001,110,27\r\n"
    "2023-11-17 00:00:01.2500000,3180,0\r\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 6052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}\n'
    "\n"
)
LENGTHS = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
    "74,918,992,0.08\n290,905,1195,0.3\n"
)
TIMED_LENGTHS = "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,74,918\n2.0,290.0,905\n"


#: `max_new_tokens` of the recorded run's requests.
MAY_GENERATE = 28


def row(arrival_s, input_tokens, output_tokens):
    return TraceRow(arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens)


def close(found):
    return [
        replace(r, arrival_s=None if r.arrival_s is None else round(r.arrival_s, 5)) for r in found
    ]


#: As of 2024: times have an offset.
AZURE_2024 = (
    AZURE.replace("000,", "000+00:00,")
    .replace("23:59:59.5", "22:59:59.5")
    .replace("5000000+00:00", "5000000-01:00")
)

EXPECTED = {
    "\ufeff" + AZURE: [row(0.0, 4808, 10), row(1.75, 3180, 1), row(3.25, 110, 27)],
    AZURE_2024: [row(0.0, 4808, 10), row(1.75, 3180, 1), row(3.25, 110, 27)],
    AZURE: [row(0.0, 4808, 10), row(1.75, 3180, 1), row(3.25, 110, 27)],
    MOONCAKE: [row(0.0, 6758, 500), row(3.052, 7322, 490)],
    LENGTHS: [row(None, 74, 918), row(None, 290, 905)],
    TIMED_LENGTHS: [row(0.0, 74, 918), row(0.5, 290, 905)],
}


@pytest.mark.parametrize("text", EXPECTED)
@pytest.mark.parametrize("packed", [False, True])
def test_every_format_plain_and_packed(tmp_path, text, packed):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert close(read_trace(path)) == EXPECTED[text]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
        b"a,b\n1,2\n",
        b'{"timestamp": 1}\n',
        b'{"timestamp": 1, "input_length": 2, "output_le',
        b"\xff\xfe\x00",
        gzip.compress(AZURE.encode())[:-20],
    ],
)
def test_a_bad_trace_names_the_file(tmp_path, data):
    path = tmp_path / "bad.csv"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.csv"):
        read_trace(path)


QWEN = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "hash_ids": [1]}
QWEN |= {"timestamp": 0.5, "input_length": 9, "output_length": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a;b\n1;2\n", "line 1: 'a;b' begins no trace: that is CSV with the columns TIMESTAMP,Con"),
        (AZURE.replace("110,", "-110,"), "line 3: ContextTokens is '-110'; it must be a number of"),
        (AZURE.replace("110,", "many,"), "line 3: ContextTokens is 'many'; it must be a number of"),
        (AZURE.replace("110,", "inf,"), "line 3: ContextTokens is 'inf'; it must be a number of"),
        (AZURE.replace(",27", ""), "line 3: GeneratedTokens is missing"),
        (
            AZURE.replace("2023-11-17", "soon"),
            "line 3: TIMESTAMP is 'soon 00:00:02.7500001'; it mus",
        ),
        (TIMED_LENGTHS.replace("2.0,", "nan,"), "line 3: arrived_at is 'nan'; it must be a number"),
        (MOONCAKE + '{"timestamp": 1,', "line 4, character 17: not JSON: Expecting property name"),
        (MOONCAKE + "[1]", r"line 4: '\[1\]' is no JSON object"),
        (MOONCAKE + '{"timestamp": 7, "input_length": 8}', "line 4: output_length is missing"),
        (MOONCAKE.replace("}", ', "class": 3}', 1), "line 1: class is 3; it must be a text"),
        (json.dumps({**QWEN, "hash_ids": 3}), "line 1: hash_ids is 3; it must be a list"),
        (json.dumps({**QWEN, "type": [3]}), r"line 1: type is \[3\]; it must be a text"),
        (
            json.dumps({**QWEN, "chat_id": {}}),
            "line 1: chat_id is {}; it must be a number or a text",
        ),
        (AZURE + '"' + "9" * 200_000, "field larger than field limit"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, text, said):
    path = tmp_path / "own.csv"
    path.write_text(text, newline="")
    with pytest.raises(ConfigError, match=rf"trace {path}(, |: ){said}"):
        read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        "arrived_at,num_prefill_tokens,num_decode_tokens,class\n1,74,9,chat\n2,80,9,\n3,90,9\n",
        MOONCAKE.replace("}\n", ', "class": "chat"}\n', 1) + MOONCAKE.splitlines()[1],
    ],
)
def test_rows_may_name_their_class(tmp_path, text):
    path = tmp_path / "own"
    path.write_text(text)
    rows = read_trace(path)
    assert [row.class_name for row in rows] == ["chat", "", ""]
    chat, other = SloClass(name="chat", ttft_s=0.3, weight=1e-9), SloClass(name="other")
    found = plan(WorkloadOptions(trace=rows, classes=(chat, other)))
    assert [one.slo for one in found] == [chat, other, other]


def test_a_recording_is_a_trace_with_objectives_and_keys(tmp_path):
    path = recorded_run(tmp_path / "run.jsonl", tbt_s=0.5, e2e_s=20.0)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    rows = read_trace(path)
    assert rows == read_trace(packed)
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in rows] == [
        (0.0, 1000, 10),
        (0.0, 100, 10),
        (0.5, 100_000, MAY_GENERATE),  # refused
        (2.0, 100, 10),
        (3.0, 100, MAY_GENERATE),  # failed
    ]
    assert [one.tenant for one in rows] == ["ann", *4 * ["default"]]
    quick, late, *_ = plan(WorkloadOptions(trace=rows))
    assert (quick.tenant, quick.slo) == (
        "ann",
        SloClass(name="chat", ttft_s=9.0, tbt_s=0.5, e2e_s=20.0),
    )
    assert late.slo == SloClass(name="chat", ttft_s=1.0)
    given = SloClass(name="chat", ttft_s=3.0)
    changed = plan(WorkloadOptions(trace=rows, classes=(given,)))
    assert [one.slo for one in changed][:2] == [given, given]


def test_a_recording_that_was_cut_off_or_damaged(tmp_path):
    path = recorded_run(tmp_path / "run.jsonl")
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert len(read_trace(path)) == 5
    path.write_text(whole.replace('"prompt_tokens":1000', '"prompt_tokens":"many"', 1))
    with pytest.raises(ConfigError, match=r"run\.jsonl.*prompt_tokens"):
        read_trace(path)
    path.write_text(whole.replace('"event":', '"what":', 1))
    with pytest.raises(ConfigError, match=r"run\.jsonl.*event"):
        read_trace(path)
    path.write_text(whole.replace('"millrace_recording":', '"millrace_recording":9', 1))
    with pytest.raises(ConfigError, match=r"run\.jsonl.*millrace_recording"):
        read_trace(path)


def test_a_missing_trace_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def drawn(text, count=4000):
    rng = random.Random(1)
    draw = parse_lengths(text, "--input-tokens")
    return [draw(rng) for _ in range(count)]


def test_length_distributions():
    assert set(drawn("7", 10)) == {7}
    uniform = drawn("100:200")
    assert (min(uniform), max(uniform)) == (100, 200)
    assert abs(statistics.mean(uniform) - 150) < 2
    lognormal = drawn("lognormal:1000:500", 20_000)
    assert abs(statistics.mean(lognormal) - 1000) < 20
    assert abs(statistics.stdev(lognormal) - 500) < 25
    assert min(drawn("lognormal:1:10")) == 1
    assert set(drawn("lognormal:20:0", 10)) == {20}


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "5:4", "1:2:3", "a", "lognormal:5", "lognormal:0:1", "lognormal:nan:1"]
)
def test_bad_lengths_name_the_option(text):
    with pytest.raises(ConfigError, match="--input-tokens"):
        parse_lengths(text, "--input-tokens")


def test_slo_classes():
    assert SloClass.parse("chat:250:50") == SloClass(name="chat", ttft_s=0.25, tbt_s=0.05)
    assert SloClass.parse("doc:6000:0:0.5") == SloClass(name="doc", ttft_s=6.0, weight=0.5)
    assert SloClass.parse("job:0:0:2:9000") == SloClass(name="job", e2e_s=9.0, weight=2.0)
    assert SloClass.parse("job:1:0:2:0") == SloClass(name="job", ttft_s=0.001, weight=2.0)
    for text in (
        "chat",
        "chat:1",
        ":1:2",
        "chat:a:b",
        "chat:-1:2",
        "chat:1:2:0",
        "c:1:2:3:-4",
        "c:1:2:3:4:5",
    ):
        with pytest.raises(ConfigError, match="slo-class"):
            SloClass.parse(text)


TRACE = [row(float(i), 10 + i, 20 + i) for i in range(10)]
FIXED = {
    "input_tokens": parse_lengths("5:50", "-"),
    "output_tokens": parse_lengths("8", "-"),
}


def take(count=None, **settings):
    return list(itertools.islice(plan(WorkloadOptions(**settings)), count))


def test_a_trace_without_rows_has_no_requests():
    """Of a low rate none may come in time; a workload without a trace never ends."""
    assert list(plan(WorkloadOptions(trace=[]))) == []
    assert list(plan(WorkloadOptions(trace=[], rate_rps=3.0))) == []
    assert len(list(itertools.islice(plan(WorkloadOptions()), 7))) == 7


def test_a_timed_trace_is_replayed_scaled_and_cut():
    found = take(trace=TRACE, rate_scale=2.0, max_input_tokens=15, max_output_tokens=22)
    assert [r.arrival_s for r in found] == [i / 2 for i in range(10)]
    assert [r.input_tokens for r in found] == [min(10 + i, 15) for i in range(10)]
    assert [r.output_tokens for r in found] == [min(20 + i, 22) for i in range(10)]
    assert len(take(trace=TRACE, duration_s=4.5)) == 5
    assert len(take(trace=TRACE, requests=3)) == 3


def test_poisson_arrivals_have_the_rate():
    found = take(rate_rps=50.0, duration_s=100.0, **FIXED)
    assert abs(len(found) - 5000) < 200
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(found)]
    assert abs(statistics.stdev(gaps) / statistics.mean(gaps) - 1) < 0.05  # exponential


def test_rows_without_times_are_drawn_again_and_again():
    rows = [row(None, i, i) for i in range(1, 6)]
    found = take(12, trace=rows, rate_rps=1.0)
    lengths = [r.input_tokens for r in found]
    assert sorted(lengths[:5]) == sorted(lengths[5:10]) == [1, 2, 3, 4, 5]
    assert [r.arrival_s for r in take(3, trace=TRACE, open_arrivals=True)] == [0.0] * 3


def test_the_rate_leaves_the_requests_alone():
    def shape(**settings):
        classes = [SloClass(name="a", weight=3), SloClass(name="b")]
        found = take(200, **settings, **FIXED, classes=classes)
        return [(r.index, r.input_tokens, r.output_tokens, r.slo.name) for r in found]

    first = shape(rate_rps=1.0, seed=4)
    assert first == shape(rate_rps=9.0, seed=4) == shape(open_arrivals=True, seed=4)
    assert first != shape(rate_rps=1.0, seed=5)
    assert 120 < sum(name == "a" for *_, name in first) < 180


def test_given_lengths_go_before_the_traces():
    found = take(trace=TRACE, input_tokens=parse_lengths("3", "-"))
    assert {r.input_tokens for r in found} == {3}
    assert [r.output_tokens for r in found] == [20 + i for i in range(10)]


EXTRACTS = Path(__file__).parents[2] / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "first", "last_s"),
    [
        ("azure2023_code.csv", row(0.0, 4808, 10), 36.649398),
        ("azure2023_conv.csv", row(0.0, 374, 44), 26.461144),
        ("mooncake_fast25_conversation.jsonl", row(0.0, 6758, 500), 15.0),
        ("sharegpt_8k_lengths.csv", row(None, 74, 918), None),
        ("arxiv_summarization_lengths.csv", row(None, 3772, 54), None),
    ],
)
def test_extracts_of_the_public_traces(name, first, last_s):
    rows = read_trace(EXTRACTS / name)
    assert len(rows) == 50
    assert rows[0] == first
    assert rows[-1].arrival_s == (None if last_s is None else pytest.approx(last_s))


QWEN = "".join(
    json.dumps(
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": stamp,
            "input_length": tokens,
            "output_length": 7,
            "type": kind,
            "turn": 1,
            "hash_ids": list(range(blocks)),
        }
    )
    + "\n"
    for chat, parent, stamp, tokens, kind, blocks in [
        (10, -1, 1.0, 100, "text", 7),
        (11, 10, 2.5, 200, "text", 13),  # follows 10: 16 * (13 - 7)
        (12, 10, 3.0, 300, "search", 19),  # not text: whole
        (13, 99, 4.0, 400, "text", 25),  # its parent is not in the file: whole
        (14, 11, 121.5, 150, "text", 10),  # fewer blocks than its parent: one token
    ]
)


def test_qwens_turns_become_single_ones(tmp_path):
    path = tmp_path / "qwen.jsonl"
    path.write_text(QWEN)
    rows = read_trace(path)
    assert [(r.arrival_s, r.input_tokens, r.class_name) for r in rows] == [
        (0.0, 100, "text"),
        (1.5, 96, "text"),
        (2.0, 300, "search"),
        (3.0, 400, "text"),
        (120.5, 1, "text"),
    ]


def test_a_window_of_a_trace():
    found = cut_window(TRACE, 2.0, 5.0)
    assert [(r.arrival_s, r.input_tokens) for r in found] == [
        (0.0, 12),
        (1.0, 13),
        (2.0, 14),
        (3.0, 15),
    ]
    for rows, window in ((TRACE, (20.0, 30.0)), ([row(None, 1, 1)], (0.0, 1.0))):
        with pytest.raises(ConfigError, match="--window"):
            cut_window(rows, *window)


def test_a_rows_class_goes_before_the_weights():
    rows = [replace(r, class_name=name) for r, name in zip(TRACE, "ababcababc", strict=True)]
    classes = [SloClass(name="a", ttft_s=1.0), SloClass(name="b", ttft_s=2.0, weight=0.001)]
    found = take(trace=rows, classes=classes)
    assert [r.slo.ttft_s for r in found] == [1.0, 2.0, 1.0, 2.0, None] * 2
    assert found[4].slo.name == "c"


def test_rows_may_be_drawn_one_by_one():
    found = take(
        50, draw_row=lambda rng: row(None, rng.randint(1, 9), 2), rate_rps=2.0, rate_scale=4.0
    )
    assert len({r.input_tokens for r in found}) == 9
    assert 50 / 8 / 2 < found[-1].arrival_s < 50 / 8 * 2
