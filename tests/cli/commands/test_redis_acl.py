"""`millrace redis-acl`: what it writes, tried on a real redis-server."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.core.config import StoreConfig
from millrace.state.open import open_store
from millrace.state.redis.access import RIGHTS
from support.redis_servers import HOST, PRIMARY, redis_server

URL = f"redis://{HOST}:{PRIMARY}/0"


async def test_every_service_gets_a_url_that_its_redis_knows(tmp_path: Path) -> None:
    folder = tmp_path / "acl"
    done = CliRunner().invoke(app, ["redis-acl", str(folder), "--url", URL, "--prefix", "mill"])
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    urls = {service: (folder / f"{service}.url").read_text().strip() for service in RIGHTS}
    assert len(set(urls.values())) == len(RIGHTS)
    passwords = [url.split(":")[2].split("@")[0] for url in urls.values()]
    written = (folder / "users.acl").read_text()
    assert not any(password in done.output + written for password in passwords)
    file = f"aclfile {folder / 'users.acl'}"
    user, password = "mill-kvp", passwords[list(urls).index("kvp")]
    async with redis_server(PRIMARY, file, user=user, user_password=password):
        for url in urls.values():
            store = open_store(StoreConfig(url=url, key_prefix="mill"))
            await store.ping()
            await store.close()


@pytest.mark.parametrize("scheme", ["rediss", "redis+sentinel", "rediss+cluster"])
def test_urls_of_all_kinds_get_their_users(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://a:1,b:2/"
    done = CliRunner().invoke(app, ["redis-acl", str(tmp_path / "acl"), "--url", url])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "acl" / "kvp.url").read_text()
    assert re.fullmatch(re.escape(scheme) + r"://millrace-kvp:[\w-]+@a:1,b:2/", written)


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["redis-acl", str(tmp_path)])
    assert done.exit_code == 2 and "File exists" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [("--url", "redis://me:secret@host:6379"), ("--url", "http://host"), ("--prefix", "a b")],
)
def test_options_that_make_no_sense(tmp_path: Path, option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["redis-acl", str(tmp_path / "acl"), option, value])
    assert done.exit_code == 2 and option in done.output and "secret" not in done.output
    assert not (tmp_path / "acl").exists()
