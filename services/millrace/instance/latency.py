"""Finds a worker's latency models: from a measured profile, else from a brief fit at start."""

from __future__ import annotations

import logging
from types import MappingProxyType

from millrace.core.config import EngineConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.profile import Profile
from millrace.engine.assembly import Engine, profile_key
from millrace.engine.calibration import (
    calibrate,
    calibrate_decode,
    warm_up_decode,
    warm_up_prefill,
)
from millrace.engine.kv.page_table import PageTable
from millrace.profiles import load_profile
from millrace.profiles.cache import ProfileCache
from millrace.profiles.decode_step import fit, of_profile
from millrace.profiles.degrees import estimated

log = logging.getLogger(__name__)


def prefill_latency(engine: Engine, config: EngineConfig, passes_at_once: int = 1) -> SpLatency:
    """Fits Eq. (1) of one instance and of groups, as `engine.profile` says, and logs the source.

    The CUDA graphs of short prefills are captured first, because they change the times.

    Measured groups are used as measured. Other groups are estimated by the ring model if each
    instance has its own device; CPU instances may share unknown cores, so none are estimated.

    `passes_at_once`: the number of stages of a prefill instance. A pass occupies the instance for
    its share of the seconds of the chain (SPP: "divided by the degree", Mnemosyne section 4.3);
    queues and chunks are planned with this share. The other stages' shares of a prompt's last pass
    are left out. Ring passes do not overlap.

    Raises ConfigError for a named profile that can't be read.
    """
    engine.runner.capture_prefills()
    profile = profile_of(engine, config)
    if profile is None:
        log.info("prefill times: a brief fit at start; `millrace profile` measures better ones")
        one = calibrate(engine, config.max_chunk_tokens).scaled(1 / passes_at_once)
        measured = {}
    else:
        warm_up_prefill(engine)
        by_sp = profile.prefill.by_sp
        one, measured = by_sp[1], {sp: by_sp[sp] for sp in profile.measured_sp if sp in by_sp}
    guessed: dict[int, Latency] = {}
    if engine.device.type != "cpu":
        guessed = estimated(one, engine.layout.num_layers)
        guessed = {sp: latency for sp, latency in guessed.items() if sp not in measured}
    log.info("%s", _groups(measured, guessed))
    return SpLatency(by_sp=MappingProxyType({1: one, **guessed, **measured}))


def decode_table(engine: Engine, config: EngineConfig) -> PageTable | None:
    """Returns the page table of a GPU's decode batch, over which the CUDA graphs of steps are
    captured now: before steps are timed. None on a CPU."""
    if engine.device.type != "cuda":
        return None
    table = PageTable(config.max_batch, engine.storage.device)
    engine.runner.follow(table)
    return table


def decode_step(
    engine: Engine, config: EngineConfig, table: PageTable | None = None
) -> DecodeStepTime:
    """Fits the time of a decode step of one instance, as `engine.profile` says.

    `table`: as of `decode_table`. Raises ConfigError for a named profile that can't be read.
    """
    profile = profile_of(engine, config)
    if profile is None:
        terms = fit(calibrate_decode(engine, config.max_batch, table))
    else:
        warm_up_decode(engine, table)
        terms = of_profile(profile.operators)
    step = DecodeStepTime.of(terms)
    log.info("%s", step)
    return step


def profile_of(engine: Engine, config: EngineConfig) -> Profile | None:
    """Loads the profile that `engine.profile` names: a file, the cache's entry, or None; logs it.

    The cache has profiles of unstaged instances only; a staged instance is measured at start. A
    named file is used unchanged.
    Raises ConfigError for a named profile that can't be read.
    """
    if config.profile.endswith(".json"):
        log.info("times: profile %s", config.profile)
        return load_profile(config.profile)
    if config.profile == "auto" and config.stages == 1:
        cache, key = ProfileCache(config.profile_cache), profile_key(engine.folder, config)
        profile = cache.load(key)
        if profile is not None:
            log.info("times: measured profile %s", cache.path(key))
        return profile
    return None


def _groups(measured: dict[int, Latency], guessed: dict[int, Latency]) -> str:
    """Describes the sources of the groups' times, for the log."""
    if not measured and not guessed:
        return "groups of instances: unknown; `millrace profile --sp` measures them"
    sources = (("measured", measured), ("estimated from one instance", guessed))
    return "groups of instances: " + "; ".join(
        f"{', '.join(map(str, sorted(found)))} {what}" for what, found in sources if found
    )
