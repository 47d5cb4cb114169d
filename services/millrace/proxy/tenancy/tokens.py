"""Checks JSON web tokens of an OpenID provider: signature, issuer, audience and times.

PyJWT checks them, with the issuer's public keys from its JWKS address. Only asymmetric signatures
count: a public key can't be abused as a shared secret. The keys are fetched again when they are
old, and when a token names a key that is not among them (the issuer has changed its keys), but not
more often than every few seconds, so that invented names cause no flood at the issuer. If the
issuer is out of reach, the last keys stay in use. A check is remembered for as long as keys are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import jwt

from millrace.core.config import AuthConfig
from millrace.proxy.errors import unavailable

log = logging.getLogger(__name__)

ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)

#: Keys are fetched again after this long; for an unknown key at most this often.
KEYS_S = 300.0
ASK_AGAIN_S = 10.0
_TIMEOUT_S = 5.0

#: Tokens whose checks are remembered until they expire.
_MOST_TOKENS = 4096


class InvalidToken(Exception):
    """The token does not count; the message says why, without its content."""


def looks_like_token(key: str) -> bool:
    """Whether a bearer token has the three parts of a JSON web token."""
    return key.count(".") == 2


class Tokens:
    """Finds the tenant that a token names."""

    def __init__(
        self,
        config: AuthConfig,
        *,
        unix: Callable[[], float] = lambda: time.time_ns() / 1e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unix` is compared with tokens' times, `clock` with the age of keys; both in seconds."""
        self._config = config
        self._unix = unix
        self._keys = _Keys(config.oidc_jwks_url, clock)
        self._known: dict[bytes, tuple[str, float]] = {}  # tenant and until when, by digest

    async def tenant(self, token: str, digest: bytes) -> str:
        """Returns the tenant's name. `digest` is SHA-256 of the token.

        Raises InvalidToken, and ApiError (503) if no public key could be fetched.
        """
        known = self._known.get(digest)
        now_s = self._unix()
        if known is not None and now_s < known[1]:
            return known[0]
        try:
            key = await self._keys.of(jwt.get_unverified_header(token).get("kid"))
            claims = self._checked(token, key, now_s)
        except jwt.PyJWTError as error:
            raise InvalidToken(_reason(error)) from error
        name = claims.get(self._config.oidc_tenant_claim)
        if not isinstance(name, str):
            raise InvalidToken(f"it has no text in the claim {self._config.oidc_tenant_claim!r}")
        if len(self._known) >= _MOST_TOKENS:
            del self._known[next(iter(self._known))]
        until_s = min(float(claims["exp"]) + self._config.oidc_leeway_s, now_s + KEYS_S)
        self._known[digest] = (name, until_s)
        return name

    def _checked(self, token: str, key: jwt.PyJWK, now_s: float) -> dict[str, Any]:
        """Raises PyJWTError."""
        leeway_s = self._config.oidc_leeway_s
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=ALGORITHMS,
            audience=self._config.oidc_audience,
            issuer=self._config.oidc_issuer,
            # The times are checked below, by this object's clock.
            options={
                "require": ["exp", "iss", "aud"],
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
        expires_s, begins_s = claims["exp"], claims.get("nbf", 0)
        if not (isinstance(expires_s, int | float) and isinstance(begins_s, int | float)):
            raise jwt.DecodeError("its times are no numbers")
        if now_s >= expires_s + leeway_s:
            raise jwt.ExpiredSignatureError("it has expired")
        if now_s < begins_s - leeway_s:
            raise jwt.ImmatureSignatureError("it is not valid yet")
        return claims


def _reason(error: jwt.PyJWTError) -> str:
    """Returns the library's words, as the end of a sentence."""
    text = str(error).rstrip(".") or type(error).__name__
    return text[:1].lower() + text[1:]


class _Keys:
    """The issuer's public keys."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._source = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=_TIMEOUT_S)
        self._clock = clock
        self._by_id: dict[str | None, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._fetching = asyncio.Lock()

    async def of(self, key_id: str | None) -> jwt.PyJWK:
        """Raises PyJWTError for an unknown key, ApiError (503) if none could be fetched."""
        if self._is_due(key_id):
            async with self._fetching:
                if self._is_due(key_id):  # another request may have fetched them meanwhile
                    await self._fetch()
        if self._fetched_at is None:
            raise unavailable("The issuer of tokens does not answer.")
        found = self._by_id.get(key_id)
        if found is None:
            raise jwt.InvalidKeyError("its key is not among the issuer's")
        return found

    def _is_due(self, key_id: str | None) -> bool:
        now = self._clock()
        if self._tried_at is not None and now - self._tried_at < ASK_AGAIN_S:
            return False
        old = self._fetched_at is None or now - self._fetched_at >= KEYS_S
        return old or key_id not in self._by_id

    async def _fetch(self) -> None:
        self._tried_at = self._clock()
        try:
            found = await asyncio.to_thread(self._source.get_signing_keys)
        except jwt.PyJWTError as error:
            log.warning("auth.oidc_jwks_url: %s", error)
            return
        self._fetched_at = self._clock()
        self._by_id = {key.key_id: key for key in found}
