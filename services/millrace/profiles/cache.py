"""Keeps this machine's measurements between starts.

Each key has one file, named by the key's hash and holding the key itself. A file that is not a
profile, or has another key, is not used: the caller measures again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.home import expanded, of_user
from millrace.profiles import encode

log = logging.getLogger(__name__)

#: Below the user's cache folder, unless XDG_CACHE_HOME is set.
DEFAULT_FOLDER = "~/.cache/millrace/profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """All values that measured times depend on.

    device: the processor's name. threads: compute threads. max_chunk_tokens: the longest pass in
    tokens; a longer prompt is timed pass by pass. kernels: what computes on a CPU.
    """

    model_hash: str
    device: str
    dtype: str
    threads: int
    max_chunk_tokens: int
    tensor_parallel: int = 1
    kernels: str = ""

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"


class ProfileCache:
    """A folder of profiles by key."""

    def __init__(self, folder: str = "") -> None:
        """`folder` is empty for `DEFAULT_FOLDER`."""
        self.folder = expanded(folder) if folder else of_user(DEFAULT_FOLDER)

    def path(self, key: ProfileKey) -> Path:
        return self.folder / key.file_name

    def load(self, key: ProfileKey) -> Profile | None:
        """Returns the key's profile; None when there is none, and with a warning when it can't be
        used.
        """
        path = self.path(key)
        try:
            data = json.loads(path.read_text("utf-8"))
            profile = Profile.from_json(data)
            if data.get("key") != asdict(key):
                raise ConfigError(f"it is of {data.get('key')!r:.100}, not of {asdict(key)}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ConfigError) as error:
            log.warning("the cached profile %s is not used: %s", path, error)
            return None
        return profile

    def store(self, key: ProfileKey, profile: Profile) -> Path:
        """Replaces the key's profile. Raises ConfigError when it can't."""
        path = self.path(key)
        write_whole(path, keyed(key, profile))
        return path


def keyed(key: ProfileKey, profile: Profile) -> str:
    """Returns the text of a measured profile's file: the profile and its key."""
    return encode(profile.to_json() | {"key": asdict(key)})


def require_writable(path: Path) -> None:
    """Raises ConfigError when a file can't be written there; call it before a long measurement."""
    folder = next(p for p in path.absolute().parents if p.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{path} can't be written")


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, and makes its folder.

    Raises ConfigError that names the file when it can't be written.
    """
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
        ) as file:
            draft = Path(file.name)
            file.write(text)
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
    finally:
        if draft is not None:
            with suppress(FileNotFoundError):
                draft.unlink()
