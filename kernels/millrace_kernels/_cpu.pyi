from enum import Enum

class Type(Enum):
    F32 = 0
    BF16 = 1

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
def compute_rows_alike(alike: bool) -> None: ...

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
    ) -> None: ...
    def prepare(self) -> None: ...
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

class Linear:
    def __init__(self, type: Type, weight: int, bias: int, inputs: int, outputs: int) -> None: ...
    def run(self, x: int, x_stride: int, rows: int, out: int, threads: int) -> None: ...
    def run_after_norm(
        self,
        x: int,
        x_stride: int,
        residual: int,
        rows: int,
        norm_weight: int,
        eps: float,
        total: int,
        out: int,
        threads: int,
    ) -> None: ...
    def run_after_silu(self, gate_up: int, rows: int, out: int, threads: int) -> None: ...

class Experts:
    def __init__(
        self, type: Type, gate_up: int, down: int, experts: int, width: int, hidden: int
    ) -> None: ...
    def run(
        self,
        x: int,
        x_stride: int,
        rows: int,
        expert_ids: int,
        weights: int,
        per_token: int,
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
def rope_write_kv(
    type: Type,
    qkv: int,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    cos: int,
    sin: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    kv: int,
    num_pages: int,
    page_tokens: int,
    slots: int,
    threads: int,
) -> None: ...
def sample(
    logits: int,
    stride: int,
    rows: int,
    vocab: int,
    temperatures: int,
    top_k: int,
    top_p: int,
    min_p: int,
    uniforms: int,
    ids: int,
    peaks: int,
    threads: int,
) -> None: ...
