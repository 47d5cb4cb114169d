"""The sections of files and batches: `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.config.fields import Section, setting, within


@dataclass(frozen=True, kw_only=True)
class FilesConfig(Section):
    url: str = setting(
        "",
        None,
        "folder, or fsspec URL (`s3://bucket/folder`), of the bytes of files; all replicas need "
        "the same. Empty: ~/.local/share/millrace/files, or a temporary folder if "
        "store.url is memory://. none: files and batches are refused",
    )
    group: str = setting(
        "",
        None,
        "proxies of one group share files and batches; gateways with the same store need several",
    )
    max_bytes: int = setting(512 << 20, within(1), "largest file; larger files get 413")
    ttl_s: float = setting(
        30 * 86400.0, within(1), "lifetime of a file whose client states no expires_after"
    )


@dataclass(frozen=True, kw_only=True)
class BatchesConfig(Section):
    slo_class: str = setting("batch", None, "class of a batch's requests")
    max_lines: int = setting(50_000, within(1, 1_000_000), "requests of a batch")
    max_input_bytes: int = setting(200 << 20, within(1), "bytes of a batch's input file")
    max_inflight: int = setting(
        16, within(1, 4096), "requests of batches open at once in one proxy process"
    )
    max_running: int = setting(
        4, within(0, 1024), "batches that one proxy process runs at once; 0: none"
    )
    lease_s: float = setting(
        15.0, within(0.05), "silence after which another proxy takes over a batch"
    )
    ttl_s: float = setting(
        30 * 86400.0, within(1), "lifetime of a batch's record after its completion window"
    )
