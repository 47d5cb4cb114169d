"""/v1/files with the unmodified openai client, on one replica and on two."""

from __future__ import annotations

import openai
import pytest

from millrace.core.config import StoreConfig
from millrace.proxy.files.store import GRACE_S
from support.batches import files_on
from support.gateway import gateway
from support.stores import private_redis

LINES = b'{"a": 1}\n{"b": 2}\n'


@pytest.fixture
async def stack(tmp_path):
    url = tmp_path / "files"
    async with gateway(
        tmp_path / "model", f"files.url={url}", "files.max_bytes=3000000"
    ) as running:
        yield running


async def upload(stack, content=LINES, name="in.jsonl", **fields):
    return await stack.client.files.create(
        file=(name, content), purpose=fields.pop("purpose", "batch"), **fields
    )


async def post(stack, files=None, data=None, **more):
    answer = await stack.http.post("/v1/files", files=files, data=data, **more)
    return answer.status_code, answer.json()["error"]


async def test_a_file_comes_back_as_it_went(stack):
    content = bytes(range(256)) * 8192  # two pieces, and all bytes
    made = await upload(stack, content, "../data/é.jsonl")
    assert made.filename == "é.jsonl"
    assert (made.object, made.purpose, made.status) == ("file", "batch", "processed")
    assert made.bytes == len(content)
    assert made.expires_at - made.created_at == 30 * 86400
    assert await stack.client.files.retrieve(made.id) == made
    assert (await stack.client.files.content(made.id)).content == content
    assert (await stack.client.files.wait_for_processing(made.id)) == made


async def test_an_empty_file_has_no_bytes(stack):
    made = await upload(stack, b"")
    assert made.bytes == 0
    assert (await stack.client.files.content(made.id)).content == b""


async def test_the_client_says_when_a_file_expires(stack):
    made = await upload(stack, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at - made.created_at == 3600
    with pytest.raises(openai.BadRequestError) as caught:
        await upload(stack, expires_after={"anchor": "created_at", "seconds": 60})
    assert caught.value.param == "expires_after[seconds]"


async def test_a_deleted_file_is_gone_with_its_bytes(stack, tmp_path):
    made = await upload(stack)
    blobs = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in blobs] == [LINES]
    deleted = await stack.client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    assert not blobs[0].exists()
    for call in (
        stack.client.files.retrieve,
        stack.client.files.content,
        stack.client.files.delete,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(made.id)
        assert caught.value.message.count(f"No such File object: {made.id}")
    assert (await stack.client.files.list()).data == []


async def test_lists_have_pages_orders_and_purposes(stack):
    made = [await upload(stack, name=f"{i}") for i in range(3)]
    other = await upload(stack, purpose="user_data")
    newest = [file.id for file in (other, *reversed(made))]
    assert [file.id async for file in stack.client.files.list(limit=1)] == newest
    page = await stack.client.files.list(order="asc", limit=2)
    assert [file.id for file in page.data] == [made[0].id, made[1].id]
    assert page.has_more
    batches = stack.client.files.list(purpose="batch", limit=2)
    assert [file.id async for file in batches] == newest[1:]
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.files.list(after="file-none")
    assert caught.value.param == "after"


async def test_what_is_too_large_is_refused_and_leaves_no_bytes(stack, tmp_path):
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(stack, b"x" * 3_000_001)
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    with pytest.raises(openai.APIStatusError) as caught:  # by its announced length alone
        await upload(stack, b"x" * 4_000_000)
    assert caught.value.status_code == 413
    assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []


async def test_wrong_forms_are_refused_by_name(stack):
    file = {"file": ("a", b"x")}
    assert (await post(stack, file))[1]["param"] == "purpose"
    status, error = await post(stack, file, {"purpose": "fine-tune"})
    assert (status, error["param"]) == (400, "purpose")
    status, error = await post(stack, {"other": ("a", b"x")}, {"purpose": "batch"})
    assert (status, error["param"]) == (400, "file")
    status, error = await post(stack, file, {"purpose": "b" * 2000})
    assert (status, error["param"]) == (400, "purpose")
    status, error = await post(stack, json={})
    assert (status, error["param"]) == (415, "Content-Type")
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"no form", b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\nab"):
        status, error = await post(stack, content=body, headers=form)
        assert (status, error["code"]) == (400, "invalid_form")


async def test_any_replica_has_a_file_and_only_for_its_tenant(tmp_path):
    async with (
        private_redis() as redis,
        gateway(tmp_path / "a", f"store.url={redis}", f"files.url={tmp_path / 'files'}") as one,
        gateway(tmp_path / "b", f"store.url={redis}", f"files.url={tmp_path / 'files'}") as two,
    ):
        made = await upload(one)
        assert (await two.client.files.content(made.id)).content == LINES
        assert [file.id async for file in two.client.files.list()] == [made.id]
        await two.client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await one.client.files.retrieve(made.id)


async def test_bytes_without_a_file_are_swept_after_their_time(tmp_path):
    async with files_on(StoreConfig(), str(tmp_path)) as world:
        async with world.files.blob(60.0) as (_, writer):
            await writer.write(b"an upload whose process died here")
        [blob] = [path for path in tmp_path.rglob("*") if path.is_file()]
        world.now_s += 60.0 + GRACE_S
        assert await world.files.sweep() == 0
        assert blob.exists()
        world.now_s += 1.0
        assert await world.files.sweep() == 1
        assert not blob.exists()
        assert await world.files.sweep() == 0
