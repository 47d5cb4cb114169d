"""Models by folder and by hub id."""

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.core.errors import ModelError
from millrace.model_folder import resolve_model


def test_resolve_model_finds_folders_and_explains_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="a/b/c: no such model folder"):
        resolve_model("a/b/c")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "from millrace.model_folder import resolve_model\n"
        "from millrace.core.errors import ModelError\n"
        "try: resolve_model('millrace-tests/none-such')\n"
        "except ModelError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("millrace-tests/none-such: no such folder, and the Hugging Face")
    assert run.stdout.count("\n") == 1
