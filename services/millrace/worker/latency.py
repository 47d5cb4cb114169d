"""Where a worker's prefill times come from: a measured profile, else a brief fit at start."""

from __future__ import annotations

import logging

from millrace.core.config import EngineConfig
from millrace.core.latency import Latency
from millrace.engine.assembly import Engine, calibrate, profile_key
from millrace.profiles import load_profile
from millrace.profiles.cache import ProfileCache

log = logging.getLogger(__name__)


def prefill_latency(engine: Engine, config: EngineConfig) -> Latency:
    """Eq. (1) of one instance as `engine.profile` says, and logs which it was.

    Raises ConfigError for a named profile that can't be read.
    """
    if config.profile.endswith(".json"):
        log.info("prefill times: profile %s", config.profile)
        return load_profile(config.profile).prefill.by_sp[1]
    if config.profile == "auto":
        cache, key = ProfileCache(config.profile_cache), profile_key(engine.folder, config)
        profile = cache.load(key)
        if profile is not None:
            log.info("prefill times: measured profile %s", cache.path(key))
            return profile.prefill.by_sp[1]
    log.info("prefill times: a brief fit at start; `millrace profile` measures better ones")
    return calibrate(engine)
