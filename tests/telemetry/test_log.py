"""The output on stderr of a real process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys, warnings
from millrace.core.config import TelemetryConfig
from millrace.telemetry.log import setup_logging

setup_logging(TelemetryConfig(log_level="info", log_format=sys.argv[1]), "first")
setup_logging(TelemetryConfig(log_level="info", log_format=sys.argv[1]), "decode-0")
log = logging.getLogger("millrace.decode")
log.debug("unseen")
extra = {"request_id": "r1", "tokens": 3, "color_message": "\\x1b[36m"}
log.info("joined %s", "a\\nb", extra=extra)
warnings.warn("old", stacklevel=1)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("100% wrong")
"""


def stderr_of(log_format: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, log_format], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_json_lines() -> None:
    lines = [json.loads(line) for line in stderr_of("json").splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    first = lines[0]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\d\+00:00", first.pop("time"))
    assert first == {
        "level": "info",
        "service": "decode-0",
        "logger": "millrace.decode",
        "message": "joined a\nb",
        "request_id": "r1",
        "tokens": 3,
    }
    assert lines[2]["message"] == "100% wrong"
    assert lines[2]["exception"].endswith("ZeroDivisionError: division by zero")


def test_text_lines() -> None:
    text = stderr_of("text")
    assert re.match(
        r"\d\d:\d\d:\d\d\.\d\d\d info    decode-0 millrace\.decode: "
        r"joined a\nb request_id=r1 tokens=3\n",
        text,
    )
    assert "error   decode-0 millrace.decode: 100% wrong\nTraceback" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert "unseen" not in text


@pytest.mark.parametrize("service", ["100%", "a%sb"])
def test_service_names_are_no_format(service: str) -> None:
    script = SCRIPT.replace('"decode-0"', repr(service))
    done = subprocess.run(
        [sys.executable, "-c", script, "text"], capture_output=True, text=True, check=True
    )
    assert f" {service} millrace.decode: joined" in done.stderr
