"""Every kernel compiles for a GPU, without one, with the variants of its own launch: for sm_90, and
in the slow suite for two more.

The operations run on CPU tensors with `launch` replaced: it does not queue the kernel, but compiles
it with the launch's argument types, constants and configuration, and checks its needs of an SM:
shared memory, registers, and bytes of registers that were spilled to memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from millrace_kernels.api import plan_attention
from millrace_kernels.triton_backend import attention, configs, linear, moe, rows, sampling

SHARED_KIB = {"sm_80": 99, "sm_90": 227, "sm_100": 227}
"""KiB of shared memory of one program; for sm_80 the limit of 8.6 and 8.9."""

REGISTERS = 65_536
"""Registers of an SM, which one program must not exceed."""

SPILLED = {
    "attend/sm_80/16bit": 64,
    "attend/sm_80/32bit": 32,
    "attend/sm_90/16bit": 144,  # few registers, so that an SM has two programs: faster on an H200
    "attend/sm_90/32bit": 576,
    "attend/sm_100/16bit": 224,
    "attend/sm_100/32bit": 616,
    "expand/sm_100/32bit": 8,
}
"""Most bytes that a thread of a kernel spills to memory; 0 for a kernel not named."""

TABLE_OF = {"sm_80": "sm_80", "sm_90": "sm_90", "sm_100": "sm_90"}
"""The entries of the table of tile sizes that a GPU uses."""

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@pytest.fixture(
    params=[
        gpu if gpu == "sm_90" else pytest.param(gpu, marks=pytest.mark.slow) for gpu in TABLE_OF
    ]
)
def compiled(request, monkeypatch, tmp_path) -> dict[str, int]:
    """Returns the names of the launched kernels, and the bytes of shared memory of each."""
    if not Path(knobs.nvidia.ptxas_blackwell.path).exists():
        pytest.skip("this Triton brings no ptxas")
    found: dict[str, int] = {}

    def compile_it(
        kernel, grid, *args, num_warps=4, num_stages=2, max_registers=0, **constants
    ) -> None:
        assert all(side > 0 for side in grid) and max(grid[1:], default=1) < 2**16
        source = ASTSource(kernel, *signature(kernel, args, constants))
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        options["maxnreg"] = max_registers or None
        target = GPUTarget("cuda", int(request.param[3:]), 32)
        built = triton.compile(source, target=target, options=options)
        shared = built.metadata.shared
        assert shared <= SHARED_KIB[request.param] * 1024
        registers, spilled, code = usage(built.asm["cubin"], tmp_path)
        assert "LDG.E.U16" not in code, "a load of single numbers: a stride of unknown alignment?"
        assert registers * 32 * num_warps <= REGISTERS
        name = f"{kernel.__name__}/{request.param}/{8 * args[0].element_size()}bit"
        assert spilled <= SPILLED.get(name, 0), f"{name} spills {spilled} bytes"
        found[kernel.__name__] = max(shared, found.get(kernel.__name__, 0))

    for module in (attention, linear, moe, rows, sampling):
        monkeypatch.setattr(module, "launch", compile_it)
    monkeypatch.setattr(configs, "gpu_name", lambda device: TABLE_OF[request.param])
    return found


def usage(cubin: bytes, folder: Path) -> tuple[int, int, str]:
    """Returns the registers of a thread of a kernel, the bytes of its stack, which is what it
    spills, and its machine code."""
    (folder / "kernel.cubin").write_bytes(cubin)
    shown, code = (
        subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, str(folder / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for option in ("--dump-resource-usage", "--dump-sass")
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2]), code


def signature(kernel, args, constants):
    """Returns Triton's types, constants and alignments for these arguments."""
    names = kernel.arg_names
    assert set(names[len(args) :]) == set(constants)
    types, aligned = {}, {}
    for i, (name, value) in enumerate(zip(names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
            is_aligned = True
        elif isinstance(value, float):
            types[name], is_aligned = "fp32", False
        else:
            types[name] = "i32"
            is_aligned = value % 16 == 0 and not kernel.params[i].do_not_specialize
        if is_aligned:
            aligned[(i,)] = [["tt.divisibility", 16]]
    types |= dict.fromkeys(constants, "constexpr")
    return types, {(names.index(name),): value for name, value in constants.items()}, aligned


def attend(
    *, head_dim=128, dtype=torch.bfloat16, q_lens=(1, 40), explicit=False, **options
) -> None:
    kv_lens = torch.tensor([3000, 500], dtype=torch.int32)
    positions = {}
    if explicit:
        positions["kv_positions"] = torch.arange(3500, dtype=torch.int32)
        positions["q_positions"] = torch.arange(sum(q_lens), dtype=torch.int32)
    checked = plan_attention(
        q_indptr=torch.tensor([0, *q_lens]).cumsum(0).int(),
        kv_lens=kv_lens,
        page_table=torch.zeros(2, 188, dtype=torch.int32),
        page_tokens=16,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device="cpu",
        backend="reference",
        **positions,
        **options,
    )
    q_nhd = torch.zeros(sum(q_lens), 8, head_dim, dtype=dtype)
    kv_layer = torch.zeros(1, 2, 2, 16, head_dim, dtype=dtype)
    out, lse = torch.zeros_like(q_nhd), torch.zeros(q_nhd.shape[:2])
    attention.plan(checked).run(q_nhd, kv_layer, scale=0.125, out_nhd=out, lse_nh=lse)


def test_attention(compiled):
    attend()
    assert compiled.keys() == {"attend", "merge_pieces"}


def test_attention_with_everything(compiled):
    attend(
        head_dim=80,
        dtype=torch.float16,
        q_lens=(1, 0),
        explicit=True,
        sliding_window=100,
        soft_cap=30.0,
    )
    out, lse = torch.zeros(3, 2, 80, dtype=torch.float16), torch.zeros(3, 2)
    attention.merge_attention_(out, lse, out.float(), lse)
    assert compiled.keys() == {"attend", "merge_partial"}  # the window leaves no slots to split


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_in_every_configuration(compiled, head_dim, dtype):
    attend(head_dim=head_dim, dtype=dtype)
    attend(head_dim=head_dim, dtype=dtype, explicit=True, sliding_window=100, soft_cap=30.0)


def test_rows(compiled):
    x, weight = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    rows.rms_norm(x, weight, 1e-6)
    rows.add_rms_norm(x, x, weight, 1e-6)
    rows.silu_mul(x)
    qkv, angles = torch.zeros(3, 12, 128, dtype=torch.bfloat16), torch.zeros(3, 64)
    pool, norm = torch.zeros(1, 2, 2, 16, 128, dtype=torch.bfloat16), weight[:128]
    slots = torch.arange(3)
    rows.rope_write_kv(qkv, angles, angles, pool, slots, num_q_heads=8)
    rows.rope_write_kv(
        qkv, angles, angles, pool, slots, num_q_heads=8, q_norm=norm, k_norm=norm, eps=1e-6
    )
    assert compiled.keys() == {"norm_rows", "multiply_by_silu", "rotate_and_write"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_skinny_linear(compiled, dtype):
    weight = torch.zeros(1024, 4096, dtype=dtype)
    linear.TritonLinear(weight, weight[0, :1024])(weight[:4])
    assert compiled.keys() == {"multiply_few_rows"}


@pytest.mark.parametrize(
    "tokens",
    [pytest.param(4, marks=pytest.mark.slow), 200],
    ids=["few", "rows"],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_experts(compiled, tokens, dtype):
    gate_up = torch.zeros(8, 2 * 256, 512, dtype=dtype)
    down = torch.zeros(8, 512, 256, dtype=dtype)
    ids = torch.arange(2 * tokens).view(-1, 2) % 8
    moe.TritonExperts(gate_up, down)(down[0, :1].expand(tokens, 256).repeat(1, 2), ids, ids.float())
    assert compiled.keys() == {"group_by_expert", "expand", "contract", "sum_experts"}


def test_choosing_experts(compiled):
    moe.choose_experts(torch.zeros(3, 128, dtype=torch.bfloat16), 8, normalised=True)
    assert compiled.keys() == {"choose_experts"}


def test_sampling(compiled):
    temperatures = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    settings = temperatures, torch.tensor([0, 0, 5]), temperatures + 1, temperatures * 0
    sampling.sample(torch.zeros(3, 32000), *settings, temperatures / 2)
    assert compiled.keys() == {"sum_weights", "draw_plain", "draw_among", "draw_by_bisection"}


def test_the_table_names_each_configuration_once():
    names = configs.committed()
    for gpu in set(TABLE_OF.values()):
        for dtype in (torch.bfloat16, torch.float32):
            for head_dim in (64, 128, 256):
                for kernel in ("attend_few", "attend_rows"):
                    assert configs.key(kernel, gpu, dtype, head_dim) in names
            for kernel in ("skinny_linear", "experts_few", "experts_rows"):
                assert configs.key(kernel, gpu, dtype) in names
    assert configs.key("attend_few", "sm_90", torch.float16, 80).endswith("16bit/d128")
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 512"):
        configs.key("attend_few", "sm_90", torch.float16, 512)
    with pytest.raises(ValueError, match="dtype must be"):
        configs.key("attend_few", "sm_90", torch.int8, 64)


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_90"),
        ((12, 0), "sm_80"),
    ],
)
def test_gpus_with_little_shared_memory_get_small_tiles(monkeypatch, capability, tiles):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    configs.gpu_name.cache_clear()
    assert configs.gpu_name(torch.device("cuda:0")) == tiles
    configs.gpu_name.cache_clear()


def test_tuning_without_a_gpu_says_so_and_writes_the_file_as_it_is(capsys):
    from millrace_kernels import tune_triton as tune

    if not torch.cuda.is_available():
        assert tune.main([]) == 1
        assert "tune: torch finds no CUDA device" in capsys.readouterr().err
    assert tune.as_json(configs.committed(), configs.measured()) == configs.PATH.read_text()
    assert configs.measured().keys() <= configs.committed().keys()


def test_importing_the_package_does_not_import_triton():
    probe = "import sys; import millrace_kernels.triton_backend as t; t.describe(); "
    probe += "import millrace_kernels.api; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)
