"""The profiles in the package: complete, within their stated errors, and rebuilt to the byte."""

import os
from importlib import resources
from pathlib import Path

import pytest

from millrace.core.cost.operators import BatchShape
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile, profile_names

SOURCE = os.environ.get("MILLRACE_PROFILE_SOURCE", "")
#: What misses the 5 % that is aimed at; docs/design/shipped-profiles.md says why.
ABOVE_FIVE_PERCENT = {("llama3-70b-a100-tp8", "prefill")}


def test_every_model_device_and_tp_is_there():
    layouts = [("8b", tp) for tp in (1, 8)] + [("70b", tp) for tp in (4, 8)]
    expected = {
        f"llama3-{size}-{device}-tp{tp}"
        for size, tp in layouts
        for device in ("a100", "h100", "h200")
    }
    assert set(profile_names()) == expected


@pytest.mark.parametrize("name", profile_names())
class TestShipped:
    def test_it_is_what_its_name_says(self, name):
        profile = load_profile(name)
        assert profile.name == name == f"{profile.model}-{profile.device}-tp{profile.tp}"
        assert profile.layers == profile.operators.layers
        assert profile.prefill.degrees == (1, 2, 4, 8, 16, 32, 64, 128)
        assert profile.sources
        assert profile.assumptions

    def test_stated_errors_are_below_five_percent(self, name):
        errors = load_profile(name).errors
        above = {key for key, error in errors.items() if error >= 0.05}
        assert above <= {key for profile, key in ABOVE_FIVE_PERCENT if profile == name}
        assert max(errors.values()) < 0.051
        assert {"qkv_proj", "attn", "decode_attn", "prefill"} <= errors.keys()

    def test_foreign_measurements_of_long_history_agree(self, name):
        assert load_profile(name).checks["history"] < 0.05

    def test_prefill_model_and_operators_agree(self, name):
        profile = load_profile(name)
        for tokens in (512, 5000, 30_000, 100_000):
            passed_s = profile.operators.pass_s(BatchShape(prefills=((tokens, 0),)))
            if tokens >= 4096 or name != "llama3-8b-a100-tp1":
                assert profile.prefill.chunk_s(tokens) == pytest.approx(passed_s, rel=0.05)

    def test_a_long_prompt_gains_from_every_degree_up_to_16(self, name):
        prefill = load_profile(name).prefill
        found = [prefill.chunk_s(1 << 20, 0, sp) for sp in (1, 2, 4, 8, 16)]
        assert found == sorted(found, reverse=True)

    def test_decode_steps_grow_with_batch_and_context(self, name):
        step_s = load_profile(name).operators.decode_step_s
        assert step_s(1, 1000) < step_s(64, 64_000) < step_s(64, 1_000_000) < step_s(256, 1 << 22)


def test_kv_bytes_are_the_models():
    assert load_profile("llama3-8b-a100-tp1").kv_bytes_per_token == 2 * 8 * 128 * 2 * 32
    assert load_profile("llama3-70b-h200-tp8").kv_bytes_per_token == 2 * 8 * 128 * 2 * 80


def test_newer_devices_are_faster():
    for layout in ("8b-{}-tp1", "70b-{}-tp4"):
        a100, h100, h200 = (
            load_profile(f"llama3-{layout.format(device)}") for device in ("a100", "h100", "h200")
        )
        assert a100.prefill.chunk_s(8192) > 2 * h100.prefill.chunk_s(8192)
        steps = [p.operators.decode_step_s(64, 500_000) for p in (a100, h100, h200)]
        assert steps == sorted(steps, reverse=True)


def test_a_profile_is_read_from_a_path_too(tmp_path):
    text = (resources.files("millrace.profiles") / "llama3-8b-a100-tp1.json").read_text()
    (tmp_path / "mine.json").write_text(text)
    assert load_profile(str(tmp_path / "mine.json")) == load_profile("llama3-8b-a100-tp1")


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'llama9'; it must be one of .*llama3-8b-a100-tp1"):
        load_profile("llama9")
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        load_profile(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: Expecting"):
        load_profile(str(tmp_path / "bad.json"))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"empty\.json: profile.format is None"):
        load_profile(str(tmp_path / "empty.json"))


@pytest.mark.skipif(
    not SOURCE, reason="MILLRACE_PROFILE_SOURCE names no folder with the measurements"
)
def test_building_again_gives_the_same_bytes(tmp_path):
    from millrace.profiles.build import main

    main(["--source", SOURCE, "--out", str(tmp_path)])
    shipped = resources.files("millrace.profiles")
    for name in profile_names():
        built = (Path(tmp_path) / f"{name}.json").read_bytes()
        assert built == (shipped / f"{name}.json").read_bytes(), name
        Profile.from_json(load_profile(name).to_json())
