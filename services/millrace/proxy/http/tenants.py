"""Finds the sender of a request by its API key or token."""

from __future__ import annotations

from hashlib import sha256

from millrace.core.config import Config
from millrace.proxy.errors import ApiError
from millrace.proxy.http.asgi import Scope, header
from millrace.proxy.metrics import TenantMetrics
from millrace.proxy.tenancy.caller import Caller
from millrace.proxy.tenancy.exchange import Exchange
from millrace.proxy.tenancy.key_ring import KeyRing
from millrace.proxy.tenancy.tokens import InvalidToken, Tokens, looks_like_token

#: Where the exchange of a request is in its scope.
EXCHANGE = "millrace.exchange"


def exchange_of(scope: Scope) -> Exchange:
    """Returns the exchange that the front made for this request."""
    found: Exchange = scope[EXCHANGE]
    return found


class Tenants:
    """Looks up the digests of keys.

    Unless keys are required, a request without a key, or with an unknown key, belongs to the tenant
    `default`, whatever the key: new keys bring nobody a share of their own. No key is kept or
    logged, not even in a cache: SHA-256 of a key takes about a microsecond.
    """

    def __init__(self, config: Config, metrics: TenantMetrics) -> None:
        """Raises ConfigError for an unusable file of keys."""
        self.keys = KeyRing(config)
        self._required = config.auth.require_key == "on"
        self._metrics = metrics
        self._tokens = Tokens(config.auth) if config.auth.oidc_issuer else None

    async def identify(self, scope: Scope) -> Caller:
        """Returns the sender. Raises ApiError (401) without a known key where one is required."""
        keys = self.keys
        if keys.empty and self._tokens is None and not self._required:
            return keys.anonymous
        key = _key_of(scope)
        if key:
            digest = sha256(key.encode("latin-1")).digest()
            found = keys.find(digest)
            if found is None and self._tokens is not None and looks_like_token(key):
                found = await self._of_token(self._tokens, key, digest)
            if found is not None:
                return found
        if self._required:
            raise self._refusal(given=bool(key))
        return keys.anonymous

    def of(self, scope: Scope) -> str:
        """Returns the name of the tenant that sent the request."""
        return exchange_of(scope).caller.tenant

    async def _of_token(self, tokens: Tokens, token: str, digest: bytes) -> Caller | None:
        """Returns the sender of a token, or None for a token that does not count.

        Raises ApiError: 401 or 403 where keys are required, 503 if the issuer has to be asked for
        its public keys and does not answer.
        """
        try:
            name = await tokens.tenant(token, digest)
        except InvalidToken as error:
            if not self._required:
                return None
            self._metrics.refused(self.keys.anonymous.tenant, "invalid_token")
            raise ApiError(
                401, f"The token is not valid: {error}.", code="invalid_api_key"
            ) from error
        found = self.keys.tenant(name)
        if found is None and self._required:
            self._metrics.refused(self.keys.anonymous.tenant, "unknown_tenant")
            raise ApiError(403, "The token names an unknown tenant.", code="unknown_tenant")
        return found

    def _refusal(self, *, given: bool) -> ApiError:
        anonymous = self.keys.anonymous.tenant
        if given:
            self._metrics.refused(anonymous, "unknown_key")
            # Not even a part of the key is repeated: answers are logged by clients and proxies.
            return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        self._metrics.refused(anonymous, "no_key")
        return ApiError(
            401,
            "You didn't provide an API key. Send it in the Authorization header, as a bearer "
            "token: 'Authorization: Bearer YOUR_KEY', or in the header x-api-key.",
            code="invalid_api_key",
        )


def _key_of(scope: Scope) -> str:
    """Returns the request's key: a bearer token, or x-api-key, as clients of Anthropic's API do."""
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and (key := key.strip()):
        return key
    return (header(scope, b"x-api-key") or "").strip()
