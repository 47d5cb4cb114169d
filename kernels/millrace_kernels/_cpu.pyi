from enum import Enum

class Type(Enum):
    F32 = 0
    BF16 = 1

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
def has_amx() -> bool: ...

class AttentionPlan:
    def __init__(
        self,
        q_indptr: int,
        kv_lens: int,
        page_table: int,
        batch: int,
        max_pages: int,
        page_tokens: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        q_positions: int,
        kv_positions: int,
        causal: bool,
        window: int,
        soft_cap: float,
        max_rows: int,
    ) -> None: ...
    def run(
        self,
        type: Type,
        q: int,
        out: int,
        float_out: bool,
        lse: int,
        kv: int,
        q_stride_n: int,
        q_stride_h: int,
        num_pages: int,
        scale: float,
        threads: int,
    ) -> None: ...

def merge_attention(
    type: Type,
    out: int,
    lse: int,
    other_type: Type,
    other: int,
    other_lse: int,
    rows: int,
    head_dim: int,
    threads: int,
) -> None: ...
def linear(
    type: Type,
    x: int,
    x_stride: int,
    m: int,
    k: int,
    weight: int,
    bias: int,
    o: int,
    out: int,
    threads: int,
) -> None: ...
def rms_norm(
    type: Type,
    x: int,
    x_stride: int,
    residual: int,
    total: int,
    weight: int,
    out: int,
    rows: int,
    width: int,
    eps: float,
    threads: int,
) -> None: ...
def silu_mul(type: Type, gate_up: int, out: int, rows: int, width: int, threads: int) -> None: ...
def rope(
    type: Type,
    x: int,
    stride_n: int,
    heads: int,
    head_dim: int,
    cos: int,
    sin: int,
    rows: int,
    threads: int,
) -> None: ...
def write_kv(
    kv: int,
    num_pages: int,
    kv_heads: int,
    page_tokens: int,
    row_bytes: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    slots: int,
    rows: int,
    threads: int,
) -> None: ...
