"""The profile codec."""

import copy
import json

import pytest

from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile, profile_names

NAME = "llama3-8b-a100-tp1"


@pytest.fixture
def data():
    return copy.deepcopy(json.loads(json.dumps(load_profile(NAME).to_json())))


@pytest.mark.parametrize("name", profile_names())
def test_json_and_back_is_the_same_profile(name):
    profile = load_profile(name)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "profile.format is 2; it must be 1"),
        (("name",), "", "name is ''; it must be a text"),
        (("tp",), 0, "tp is 0; it must be a whole number of 1 or more"),
        (("layers",), 1.5, "layers is 1.5"),
        (("ring_step_s",), -1, "ring_step_s is -1; it must be 0 or more"),
        (("measured_sp",), [1], "measured_sp is \\[1\\]; it must be whole numbers of 2 or more"),
        (("sources",), "x", "sources is 'x'; it must be a list"),
        (("errors", "attn"), "x", "attn is 'x'; it must be a finite number"),
        (("kv_transfer_bytes_s",), None, "kv_transfer_bytes_s is None; it must be an object"),
        (("prefill", "x"), {}, "prefill has the SP degree 'x'"),
        (("prefill", "1", "a"), True, "prefill.1: a is True; it must be a finite number"),
        (("prefill", "1", "points"), [[1]], "prefill.1: points has an entry of 1 numbers"),
        (("prefill", "2", "points"), [[5, 2], [5, 3]], "prefill.2: latency.points has"),
        (("operators", "attn"), [[1, 2]], "operators.attn: a table has 1 rows"),
        (("operators", "attn"), [[2, 1], [1, 1]], "operators.attn: a table's xs"),
        (("operators", "overhead_s"), None, "overhead_s is None"),
        (("operators", "decode_attn", "batches"), [1], "operators.decode_attn: .* one table"),
    ],
)
def test_a_bad_field_is_named(data, path, value, message):
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(data)


def test_a_file_from_before_groups_were_measured_is_read(data):
    assert data.pop("measured_sp") == [2, 4, 8, 16]
    assert Profile.from_json(data).measured_sp == ()


def test_mixed_batches_are_predicted_from_mixed_passes_where_these_were_measured(data):
    without = Profile.from_json(data)
    assert without.mixed is None and without.mixed_batches == without.operators
    data["mixed"] = {**data["operators"], "overhead_s": 0.5}
    found = Profile.from_json(data)
    assert found.mixed_batches.overhead_s == 0.5 and found.operators == without.operators
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    data["mixed"]["attn"] = [[1, 2]]
    with pytest.raises(ConfigError, match=r"mixed\.attn: a table has 1 rows"):
        Profile.from_json(data)


def test_a_profile_must_be_an_object():
    with pytest.raises(ConfigError, match="profile is \\[\\]; it must be an object"):
        Profile.from_json([])
