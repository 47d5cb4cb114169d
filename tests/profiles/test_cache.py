"""Profiles kept between starts: whole or not at all, and never for anything but their key."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.profiles import load_profile
from millrace.profiles.cache import ProfileCache, ProfileKey, require_writable, write_whole

KEY = ProfileKey(
    model_hash="ab12", device="Some CPU", dtype="bfloat16", threads=2, max_chunk_tokens=2048
)
PROFILE = load_profile("llama3-8b-a100-tp1")


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(str(tmp_path / "not" / "there" / "yet"))


def test_what_is_stored_is_loaded(cache: ProfileCache) -> None:
    assert cache.load(KEY) is None
    path = cache.store(KEY, PROFILE)
    assert cache.load(KEY) == PROFILE
    assert [path] == list(path.parent.iterdir())
    assert load_profile(str(path)) == PROFILE  # as `millrace sim --profile` reads it


@pytest.mark.parametrize(
    "other",
    [
        {"model_hash": "cd34"},
        {"device": "Other CPU"},
        {"dtype": "float32"},
        {"threads": 1},
        {"max_chunk_tokens": 64},
    ],
)
def test_another_key_has_another_profile(cache: ProfileCache, other: dict[str, object]) -> None:
    cache.store(KEY, PROFILE)
    assert cache.load(replace(KEY, **other)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "name": "x"}', "\udcff"])
def test_a_file_that_is_no_profile_is_not_used_and_said_so(
    cache: ProfileCache, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.store(KEY, PROFILE)
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert cache.load(KEY) is None
    assert f"{path} is not used" in caplog.text
    cache.store(KEY, PROFILE)
    assert cache.load(KEY) == PROFILE


def test_a_profile_of_another_key_in_its_place_is_not_used(
    cache: ProfileCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.store(KEY, PROFILE)
    data = json.loads(path.read_text())
    data["key"]["threads"] = 64
    path.write_text(json.dumps(data))
    assert cache.load(KEY) is None
    assert "'threads': 64" in caplog.text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    write_whole(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "p.json"):
        with pytest.raises(ConfigError, match=f"{path} can't be written"):
            require_writable(path)
        with pytest.raises(ConfigError, match=f"{path} can't be written"):
            write_whole(path, "")
    require_writable(tmp_path / "new" / "p.json")
    assert not (tmp_path / "new").exists()


def test_the_default_is_in_the_users_cache_folder() -> None:
    assert ProfileCache().folder == Path(os.path.expanduser("~/.cache/millrace/profiles"))
