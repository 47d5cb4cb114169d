"""The configuration tree: every message names the field, the value and the range."""

from __future__ import annotations

import dataclasses
import re

import pytest

from millrace.core.config import Config, SchedulerConfig, TransferConfig, load_config
from millrace.core.errors import ConfigError


def test_defaults_are_valid_and_frozen():
    config = load_config()
    assert config == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scheduler.tasks_ahead = 3


def test_fields_are_keyword_only():
    with pytest.raises(TypeError):
        SchedulerConfig("fcfs")


@pytest.mark.parametrize(
    "override, message",
    [
        ("scheduler.tasks_ahead=0", "scheduler.tasks_ahead is 0; it must be between 1 and 64"),
        ("scheduler.policy=lifo", "scheduler.policy is 'lifo'; it must be one of fcfs"),
        (
            "scheduler.planner=best",
            "scheduler.planner is 'best'; it must be one of auto, least_queue",
        ),
        ("engine.page_tokens=2000", "engine.page_tokens is 2000; it must be between 0 and 1024"),
        ("proxy.max_body_bytes=1", "proxy.max_body_bytes is 1; it must be at least 1024"),
        ("proxy.port=65536", "proxy.port is 65536; it must be between 0 and 65535"),
        ("engine.load_format=gguf", "engine.load_format is 'gguf'; it must be one of auto, dummy"),
        ("scheduler.max_queue_s=nan", "scheduler.max_queue_s is nan; it must be at least 0.1"),
        ("scheduler.tasks_ahead=two", "scheduler.tasks_ahead is 'two'; it must be int"),
        ("scheduler.tasks=2", "unknown field scheduler.tasks; there are "),
        ("sheduler.tasks_ahead=2", "unknown section 'sheduler'; there are "),
        ("scheduler.tasks_ahead", "write it as section.field=value"),
        ("tasks_ahead=2", "write it as section.field=value"),
    ],
)
def test_a_wrong_override_is_named(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[override])


def test_a_lease_shorter_than_two_heartbeats_is_a_contradiction():
    with pytest.raises(
        ConfigError, match=r"scheduler.lease_s is 1; .* scheduler.heartbeat_s \(1\)"
    ):
        load_config(overrides=["scheduler.lease_s=1"])


def test_a_file_is_read_and_overrides_win(tmp_path):
    path = tmp_path / "millrace.toml"
    path.write_text(
        "[scheduler]\ntasks_ahead = 4\nlease_s = 9\n"
        "[transfer]\nbackends = 7\n"
        "[slo_classes.chat]\nttft_s = 0.5\n"
    )
    config = load_config(path, ["scheduler.tasks_ahead=5"])
    assert config.scheduler == SchedulerConfig(tasks_ahead=5, lease_s=9.0)
    assert config.transfer == TransferConfig(backends=7)
    assert config.slo_classes["chat"].ttft_s == 0.5
    assert config.slo_classes["chat"].class_name == "chat"


@pytest.mark.parametrize(
    "text, message",
    [
        ("[scheduler]\ntasks_ahead = 1.5\n", "scheduler.tasks_ahead is 1.5; it must be int"),
        ("[scheduler]\ntasks_ahead = true\n", "scheduler.tasks_ahead is True; it must be int"),
        ("[scheduler\n", "config file"),
        ("scheduler = 3\n", "scheduler is 3; it must be a table"),
        ("[slo_classes]\nchat = 1\n", "slo_classes.chat is 1; it must be a table"),
        ("[proxy]\nhost = ['a']\n", "proxy.host is ['a']; it must be str"),
        (
            "[slo_classes.chat]\nttft_s = 0\n",
            "slo_classes.chat.ttft_s is 0.0; it must be more than 0",
        ),
        ("[slo_classes.chat]\nttft = 1\n", "unknown field slo_classes.chat.ttft; there are"),
        (
            "[slo_classes.chat]\nweight = 0\n",
            "slo_classes.chat.weight is 0; it must be a number between 0.001 and 1000",
        ),
        ("[tenants]\nacme = 1\n", "tenants.acme is 1; it must be a table"),
        ("[tenants.acme]\nkey = 'x'\n", "unknown field tenants.acme.key; there are key_sha256, w"),
        ("[tenants.acme]\nweight = '2'\n", "tenants.acme.weight is '2'; it must be a number"),
        ("[tenants.acme]\nkey_sha256 = 'sk-1'\n", "tenants.acme.key_sha256 is no SHA-256 digest"),
        (
            f"[tenants.a]\nkey_sha256 = '{'0' * 64}'\n[tenants.b]\nkey_sha256 = '{'0' * 64}'\n",
            "tenants.b.key_sha256 has 000",
        ),
        ("[class_weights]\nchat = 2\n", "unknown section 'class_weights'"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, message):
    path = tmp_path / "millrace.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(path)


def test_a_key_in_the_place_of_its_digest_is_not_shown(tmp_path):
    path = tmp_path / "millrace.toml"
    path.write_text("[tenants.acme]\nkey_sha256 = ['sk-secret']\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "sk-secret" not in str(caught.value)


def test_weights_are_of_all_classes_and_tenants(tmp_path):
    path = tmp_path / "millrace.toml"
    path.write_text(
        "[slo_classes.chat]\nweight = 2\n[slo_classes.document]\nttft_s = 30\n"
        f"[tenants.acme]\nkey_sha256 = ['{'A' * 64}', '{'b' * 64}']\nweight = 0.5\n"
        "[tenants.default]\nweight = 0.25\n"
    )
    config = load_config(path)
    assert config.weights.classes == {"default": 1.0, "chat": 2.0, "document": 1.0}
    assert config.weights.tenants == {"default": 0.25, "acme": 0.5}
    assert config.tenants["acme"].key_sha256 == ("a" * 64, "b" * 64)
    assert load_config().weights.tenants == {"default": 1.0}


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "millrace.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config file .*millrace\.toml"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml"):
        load_config(tmp_path / "no.toml")


def test_an_override_never_changes_a_files_table_into_something_else(tmp_path):
    path = tmp_path / "millrace.toml"
    path.write_text("scheduler = 3\n")
    with pytest.raises(ConfigError, match="scheduler is 3; it must be a table"):
        load_config(path, ["scheduler.tasks_ahead=2"])


@pytest.mark.parametrize(
    "given, missing", [("ca_file", "cert_file"), ("cert_file", "ca_file"), ("key_file", "ca_file")]
)
def test_of_the_three_tls_files_all_are_given_or_none(given, missing):
    wanted = f"tls.{missing} is ''; it must be the path of a file, as tls.{given} is 'x'"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        load_config(overrides=[f"tls.{given}=x"])
    assert not Config().tls.enabled
    three = [f"tls.{name}=x" for name in ("ca_file", "cert_file", "key_file")]
    assert load_config(overrides=three).tls.enabled
