"""What `millrace up` needs is checked before it starts anything."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from millrace.core.errors import MillraceError
from millrace.local.checks import check_start
from millrace.local.options import StackOptions
from millrace.local.up import start_with_progress
from millrace.shipped import SHIPPED_MODEL


def options(**changes: object) -> StackOptions:
    return StackOptions(**{"model": str(SHIPPED_MODEL), "port": 0, **changes})


async def test_a_stack_that_can_start_passes() -> None:
    await check_start(options())


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_taken_port_is_named(taken: int) -> None:
    with pytest.raises(MillraceError, match=f"--host 127.0.0.1, --port {taken}: Address already"):
        await check_start(options(port=taken))


async def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(MillraceError, match=r"--host 192.0.2.1, --port 0: Cannot assign"):
        await check_start(options(host="192.0.2.1"))


async def test_a_name_with_an_ipv6_address_only_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: int, **kwargs: int) -> list[tuple]:
        return resolve("::1" if host == "six.test" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    await check_start(options(host="six.test"))
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        with pytest.raises(MillraceError, match=f"--host six.test, --port {port}: Address already"):
            await check_start(options(host="six.test", port=port))


async def test_a_name_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[tuple]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(MillraceError, match=r"--host no\.test, --port 0: Name or service"):
        await check_start(options(host="no.test"))


async def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(MillraceError, match=r"--redis or store.url: request store redis://127.0"):
        await check_start(options(redis="redis://127.0.0.1:1"))
    with pytest.raises(
        MillraceError, match=r"--redis or store.url: store.url is 'redis'; it must be"
    ):
        await check_start(options(redis="redis"))
    with pytest.raises(MillraceError, match=r"--redis memory://: the services are processes"):
        await check_start(options(redis="memory://"))


async def test_a_store_of_files_that_nothing_can_open_is_named() -> None:
    with pytest.raises(MillraceError, match=r"files.url is 'nonesuch://x'; no backend can open it"):
        await check_start(options(files="nonesuch://x"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json is missing"),
        ({"architectures": ["FooForCausalLM"]}, "architecture 'FooForCausalLM' is not supported"),
    ],
)
async def test_every_model_is_checked(
    tmp_path: Path, config: dict[str, object] | None, said: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MillraceError, match=f"--model {tmp_path}.*{said}"):
        await check_start(options(more=[(str(tmp_path), "second")]))


async def test_nothing_is_started_when_a_check_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MillraceError, match="--model /nowhere: no such model folder"):
        await start_with_progress(options(model="/nowhere"), Console(stderr=True))
    assert "starting" not in capsys.readouterr().err
