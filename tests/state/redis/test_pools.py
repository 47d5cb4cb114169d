"""URLs of stores: what they mean, and which make no sense. Nothing is connected to."""

from __future__ import annotations

import pytest

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.open import in_memory, open_store
from millrace.state.redis.pools import cluster_of, pool_of, shown_url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://h", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://h:1,i:2/", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://h,,i/s", "'' is no address of a Sentinel"),
        ("redis+sentinel://h:99999/s", "Port out of range"),
        ("redis+sentinel://h:x/s", "Port could not be cast"),
        ("redis+sentinel://h/s/first", "the database after /s/ is 'first'; it must be a number"),
        ("redis+sentinel://h/s?colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://h/s?ssl_colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://h/s?socket_timeout=soon", "socket_timeout"),
        ("redis://h/0?colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://u:hunter2@h/s/x", "the database after /s/ is 'x'"),
        ("redis+cluster://h,,i", "'' is no address of a server"),
        ("redis+cluster://h:99999", "Port out of range"),
        ("redis+cluster://h/1", "a cluster has the database 0 alone"),
        ("redis+cluster://h/?db=2", "a cluster has the database 0 alone"),
        ("redis+cluster://h?colour=red", "an option after the question mark is unknown"),
        ("redis+cluster://h?ssl_colour=red", "an option after the question mark is unknown"),
        ("redis+cluster://u:hunter2@h/x", "a cluster has the database 0 alone"),
    ],
)
def test_urls_that_make_no_sense(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url is 'redis") as info:
        open_store(StoreConfig(url=url))
    assert message in str(info.value) and "hunter2" not in str(info.value)


def test_a_url_names_sentinels_database_user_and_tls() -> None:
    url = (
        "rediss+sentinel://me:p%40x@a,[::1]:7/s/3?sentinel_username=you&sentinel_password=q"
        "&ssl_ca_certs=ca.crt&max_connections=5"
    )
    assert not in_memory(StoreConfig(url=url))
    assert shown_url(url) == "rediss+sentinel://a,[::1]:7/s/3"
    options = {"retry": None, "protocol": 2, "driver_info": None}
    pool = pool_of(url, options)
    made = pool.make_connection()
    assert pool.max_connections == 5
    assert (made.db, made.username, made.password, made.ca_certs) == (3, "me", "p@x", "ca.crt")
    asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("a", 26379), ("::1", 7)]
    for one in asked:
        assert (one["username"], one["password"], one["ssl_ca_certs"]) == ("you", "q", "ca.crt")


def test_a_url_names_servers_of_a_cluster_a_user_and_tls() -> None:
    url = "rediss+cluster://me:p%40x@a,[::1]:7/0?ssl_ca_certs=ca.crt&max_connections=5"
    assert not in_memory(StoreConfig(url=url))
    assert shown_url(url) == "rediss+cluster://a,[::1]:7/0"
    named, pool_of = cluster_of(url, {"protocol": 2})
    assert named == [("a", 6379), ("::1", 7)]
    pool = pool_of(("b", 8))
    made = pool.make_connection()
    assert pool.max_connections == 5
    assert (made.host, made.port, made.username, made.password) == ("b", 8, "me", "p@x")
    assert made.ca_certs == "ca.crt"
