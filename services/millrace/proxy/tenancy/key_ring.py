"""Knows the tenants and the digests of their keys; reads the file of keys again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from millrace.core.config import Config, TenantConfig
from millrace.core.config.tenants import check_tenants, read_keys_file, with_keys
from millrace.core.weights import DEFAULT_TENANT
from millrace.proxy.tenancy.caller import Caller, caller_of
from millrace.proxy.watched_file import LOOK_S, WatchedFile


class KeyRing:
    """Finds the sender of a request by the digest of its key."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file. Raises ConfigError naming `auth.keys_file`. `clock` is in seconds."""
        self._config = config
        self._clock = clock
        self._file: WatchedFile | None = None
        self._looked_at = clock()
        self._of_file: Mapping[str, TenantConfig] = {}
        #: The tenants of the store that are in use.
        self.stored: Mapping[str, TenantConfig] = {}
        self._use(config.tenants)
        if path := config.auth.keys_file:
            self._file = WatchedFile("auth.keys_file", path, self._read)
            self._file.read()

    @property
    def tenants(self) -> Mapping[str, TenantConfig]:
        """All tenants, of the settings, of the file and of the store."""
        self._look()
        return self._tenants

    def check_stored(self, stored: Mapping[str, TenantConfig]) -> None:
        """Raises ConfigError if these tenants of the store do not go with the others."""
        self._merged(self._of_file, stored)

    def use_stored(self, stored: Mapping[str, TenantConfig]) -> None:
        """Replaces the tenants of the store. Raises ConfigError as `check_stored`."""
        self._use(self._merged(self._of_file, stored))
        self.stored = dict(stored)

    @property
    def empty(self) -> bool:
        """Whether there is no key and no limit, and so nothing to look up."""
        return not (self._file or self._callers or self.anonymous.accounts)

    def find(self, digest: bytes) -> Caller | None:
        """Returns the sender whose key has this SHA-256 digest, or None."""
        self._look()
        return self._callers.get(digest)

    def tenant(self, name: str) -> Caller | None:
        """Returns the sender of a token that names this tenant, or None."""
        self._look()
        return self._of_tokens.get(name)

    def _look(self) -> None:
        now = self._clock()
        if self._file is not None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._file.look()

    def _read(self, text: str) -> None:
        found = read_keys_file(text)
        tenants = self._merged(found, self.stored)
        self._of_file = found
        self._use(tenants)

    def _merged(
        self, of_file: Mapping[str, TenantConfig], stored: Mapping[str, TenantConfig]
    ) -> Mapping[str, TenantConfig]:
        """Raises ConfigError for a key of two tenants, and for an unknown class."""
        tenants = with_keys(with_keys(self._config.tenants, of_file), stored)
        check_tenants(tenants, self._config.slo_classes)
        return tenants

    def _use(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._tenants = tenants
        self._callers: dict[bytes, Caller] = {}
        self._of_tokens = {name: caller_of(name, one, key="token") for name, one in tenants.items()}
        for name, tenant in tenants.items():
            for digest in tenant.key_sha256:
                found = caller_of(name, tenant, key=digest[:8])
                self._callers[bytes.fromhex(digest)] = found
            for key in tenant.keys:
                self._callers[bytes.fromhex(key.sha256)] = caller_of(
                    name, tenant, key=key.name, own=key.access, digest=key.sha256
                )
        #: The sender of requests without a known key.
        self.anonymous = caller_of(DEFAULT_TENANT, tenants.get(DEFAULT_TENANT, TenantConfig()))
