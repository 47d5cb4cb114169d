"""Tokens of an issuer: keys made here, served by a JWKS server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from millrace.core.config import AuthConfig, load_config
from millrace.core.errors import ConfigError
from millrace.proxy.errors import ApiError
from millrace.proxy.tenancy.tokens import ASK_AGAIN_S, KEYS_S, InvalidToken, Tokens
from support.gateway import MODEL, gateway
from support.tenants import config_with, tenant_toml

ISSUER, AUDIENCE = "https://issuer.example", "millrace"
NOW_S = 1_800_000_000.0
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def public(key: Any, key_id: str) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else None
    kind = kind or jwt.algorithms.ECAlgorithm
    return json.loads(kind.to_jwk(key.public_key())) | {"kid": key_id, "use": "sig"}


class Issuer:
    """Serves `keys`, and counts how often it is asked. Without keys it answers 500."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [public(RSA, "one"), public(EC, "two")]
        self.asked = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                self.send_response(200 if issuer.keys else 500)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps({"keys": issuer.keys}).encode())

            def log_message(self, *_: object) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks"


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    found = Issuer()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class World:
    def __init__(self, url: str) -> None:
        self.unix, self.clock = Clock(NOW_S), Clock(1000.0)
        config = AuthConfig(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_jwks_url=url)
        self.tokens = Tokens(config, unix=self.unix, clock=self.clock)

    async def tenant(self, token: str) -> str:
        return await self.tokens.tenant(token, sha256(token.encode()).digest())


@pytest.fixture
def world(issuer: Issuer) -> World:
    return World(issuer.url)


def token(
    key: Any = RSA, key_id: str = "one", algorithm: str = "RS256", now_s: float = NOW_S, **claims
) -> str:
    full = {"iss": ISSUER, "aud": AUDIENCE, "exp": now_s + 600, "tenant": "acme", "sub": "someone"}
    full = {name: value for name, value in (full | claims).items() if value is not None}
    return jwt.encode(full, key, algorithm, headers={"kid": key_id})


async def test_a_token_names_its_tenant_and_keys_are_fetched_once(world, issuer):
    assert await world.tenant(token()) == "acme"
    assert await world.tenant(token(EC, "two", "ES256", tenant="beta")) == "beta"
    assert await world.tenant(token(aud=["other", AUDIENCE])) == "acme"
    assert issuer.asked == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (token(exp=NOW_S - 11), "it has expired"),
        (token(nbf=NOW_S + 11), "it is not valid yet"),
        (token(iss="https://else.example"), "issuer"),
        (token(aud="another"), "audience"),
        (token(exp=None), '"exp" claim'),
        (token(aud=None), '"aud" claim'),
        (token(tenant=None), "no text in the claim 'tenant'"),
        (token(tenant=7), "no text in the claim 'tenant'"),
        (token(OTHER_RSA), "signature verification failed"),
        (token(key_id="three"), "its key is not among the issuer's"),
        (token("a secret of at least 32 bytes, HMAC", algorithm="HS256"), "alg value"),
        (token(None, algorithm="none"), "alg value"),
        ("a.b.c", ""),
        ("..", ""),
        ("\xe9.b.c", ""),
    ],
)
async def test_a_wrong_token_is_refused_with_the_reason(world, wrong, reason):
    with pytest.raises(InvalidToken) as caught:
        await world.tenant(wrong)
    assert reason in str(caught.value)


async def test_clocks_may_differ_by_the_leeway(world):
    assert await world.tenant(token(exp=NOW_S - 9)) == "acme"
    assert await world.tenant(token(nbf=NOW_S + 9)) == "acme"


async def test_a_token_that_was_checked_expires_all_the_same(world):
    known = token()
    assert await world.tenant(known) == "acme"
    world.unix.now_s += 200
    assert await world.tenant(known) == "acme"
    world.unix.now_s += 410
    with pytest.raises(InvalidToken, match="expired"):
        await world.tenant(known)


async def test_a_new_key_of_the_issuer_is_found_but_not_asked_for_at_every_token(world, issuer):
    assert await world.tenant(token()) == "acme"
    issuer.keys = [public(OTHER_RSA, "three")]
    fresh = token(OTHER_RSA, "three")
    for _ in range(5):
        with pytest.raises(InvalidToken):
            await world.tenant(fresh)
    assert issuer.asked == 1
    world.clock.now_s += ASK_AGAIN_S
    assert await world.tenant(fresh) == "acme"
    assert issuer.asked == 2
    with pytest.raises(InvalidToken):
        await world.tenant(token(sub="new"))  # by the key that the issuer has withdrawn


async def test_a_token_of_a_withdrawn_key_ends_when_its_check_is_old(world, issuer):
    known = token(exp=NOW_S + 10_000)
    assert await world.tenant(known) == "acme"
    issuer.keys = [public(EC, "two")]
    world.clock.now_s += KEYS_S
    world.unix.now_s += KEYS_S
    with pytest.raises(InvalidToken):
        await world.tenant(known)


async def test_an_issuer_out_of_reach_leaves_the_last_keys_in_use(world, issuer):
    assert await world.tenant(token()) == "acme"
    issuer.keys = []
    world.clock.now_s += KEYS_S
    assert await world.tenant(token(sub="another")) == "acme"
    assert issuer.asked == 2


async def test_without_any_key_the_answer_is_503(world, issuer):
    issuer.keys = []
    with pytest.raises(ApiError) as caught:
        await world.tenant(token())
    assert caught.value.status == 503
    issuer.keys = [public(RSA, "one")]
    world.clock.now_s += ASK_AGAIN_S
    assert await world.tenant(token()) == "acme"


def settings_of(issuer: Issuer) -> list[str]:
    return [
        f"auth.oidc_issuer={ISSUER}",
        f"auth.oidc_audience={AUDIENCE}",
        f"auth.oidc_jwks_url={issuer.url}",
    ]


async def test_the_openai_client_shows_a_token_in_the_place_of_a_key(tmp_path, issuer):
    tables = tenant_toml("acme", "sk-acme", requests_per_minute=1)
    settings = [*settings_of(issuer), "auth.require_key=on"]
    config = config_with(tmp_path / "settings", tables, *settings)
    far_s = 4_000_000_000.0
    async with gateway(tmp_path / "model", config=config) as stack:

        async def ask(key: str) -> None:
            client = stack.client.with_options(api_key=key)
            await client.completions.create(model=MODEL, prompt="hi", max_tokens=3)

        await ask(token(now_s=far_s))
        assert stack.fleet.specs[0].tenant == "acme"
        with pytest.raises(openai.RateLimitError):  # a tenant's keys and tokens share its limits
            await ask("sk-acme")
        with pytest.raises(openai.AuthenticationError, match="expired"):
            await ask(token(now_s=1000.0))
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await ask(token(now_s=far_s, tenant="nobody"))
        assert caught.value.code == "unknown_tenant"


async def test_where_keys_are_not_required_a_wrong_token_is_the_default_tenants(tmp_path, issuer):
    config = config_with(tmp_path / "settings", tenant_toml("acme"), *settings_of(issuer))
    async with gateway(tmp_path / "model", config=config) as stack:
        client = stack.client.with_options(api_key=token(now_s=1000.0))
        await client.completions.create(model=MODEL, prompt="hi", max_tokens=3)
        assert stack.fleet.specs[0].tenant == "default"


def test_the_keys_come_from_the_web():
    with pytest.raises(ConfigError, match=r"auth\.oidc_jwks_url is 'file:///etc/passwd'; it must"):
        load_config(overrides=["auth.oidc_jwks_url=file:///etc/passwd"])


def test_tokens_need_all_settings():
    with pytest.raises(ConfigError, match=r"auth\.oidc_audience is ''; it must be set"):
        load_config(overrides=["auth.oidc_issuer=https://x", "auth.oidc_jwks_url=https://x/keys"])
