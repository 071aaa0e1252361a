"""What the linear ops promise beyond their numbers: clear errors, tracing, a fallback."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit import extension, ops
from quantkit.errors import UnsupportedError
from quantkit.gate_ops import gate_mul

# C++ kernels raise through torch, which has one exception type for all.
REJECTED = (UnsupportedError, RuntimeError)


def good_arguments() -> dict[str, object]:
    return {
        "x": torch.randn(2, 40),
        "weight": torch.zeros(6, 40).to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(6, 3),
        "bias": torch.ones(6),
        "group_size": 16,
        "activation": "silu",
    }


BAD_ARGUMENTS = {
    "x dtype": ({"x": torch.randn(2, 40).double()}, "x must be .*float16, got float64"),
    "x columns": ({"x": torch.randn(2, 41)}, r"x must be .* = \[any, 40\], got \[2, 41\]"),
    "x rank": ({"x": torch.randn(40)}, r"x must be .*\[M, K\].*, got \[40\]"),
    "x strides": ({"x": torch.randn(40, 2).T}, r"x must be contiguous, got strides \[1, 2\]"),
    "weight dtype": ({"weight": torch.randn(6, 40)}, "weight must be .*uint8.*, got float32"),
    "weight strides": (
        {"weight": torch.zeros(40, 6, dtype=torch.uint8).T},
        r"weight must be contiguous, got strides \[1, 6\]",
    ),
    "weight rank": (
        {"weight": torch.zeros(6, dtype=torch.uint8)},
        r"weight must be of shape \[N, K\] = \[any, any\], got \[6\]",
    ),
    "scale dtype": (
        {"weight_scale": torch.ones(6, 3).bfloat16()},
        "weight_scale must be float32, got bfloat16",
    ),
    "scale shape": (
        {"weight_scale": torch.ones(6, 2)},
        r"weight_scale must be .* = \[6, 3\], got \[6, 2\]",
    ),
    "scale strides": ({"weight_scale": torch.ones(3, 6).T}, "weight_scale must be contiguous"),
    "group size": ({"group_size": 0}, "group_size must be at least 1, got 0"),
    "bias dtype": ({"bias": torch.ones(6).double()}, "bias must be .*float16, got float64"),
    "bias shape": ({"bias": torch.ones(1)}, r"bias must be .*\[N\] = \[6\], got \[1\]"),
    "activation": ({"activation": "swish"}, "activation must be .*relu, got 'swish'"),
    "odd rows": (
        {
            "weight": torch.zeros(5, 40, dtype=torch.uint8),
            "weight_scale": torch.ones(5, 3),
            "bias": None,
        },
        r"weight must be gate rows then as many up rows, got \[5, 40\]",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_what_was_expected(case: str) -> None:
    bad, message = BAD_ARGUMENTS[case]
    arguments = good_arguments() | bad
    with pytest.raises(REJECTED, match=f"fp8_gated_linear: {message}"):
        torch.ops.quantkit.fp8_gated_linear(*arguments.values())


def test_each_op_names_itself() -> None:
    a = good_arguments()
    with pytest.raises(REJECTED, match="fp8_linear: weight_scale must be"):
        ops.fp8_linear(a["x"], a["weight"], a["weight_scale"][:1], None, 16)
    with pytest.raises(REJECTED, match=r"dequantize_weight: dtype must be .*, got int32"):
        ops.dequantize_weight(a["weight"], a["weight_scale"], 16, torch.int32)
    with pytest.raises(REJECTED, match=r"gate_mul: both must be gate columns .*, got \[2, 3\]"):
        gate_mul(torch.randn(2, 3), "silu")
    with pytest.raises(REJECTED, match=r"gate_mul: activation must be .*relu, got 'swish'"):
        gate_mul(torch.randn(2, 4), "swish")
    with pytest.raises(REJECTED, match="gate_mul: both must be contiguous"):
        gate_mul(torch.randn(4, 2).T, "silu")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_fake_kernels_agree_with_real_ones(dtype: torch.dtype) -> None:
    weight, scale = torch.zeros(6, 40, dtype=torch.uint8).view(dtype), torch.ones(6, 3)
    x = torch.randn(3, 40).bfloat16()
    arguments = (weight, scale, torch.ones(6), 16)
    quantkit = torch.ops.quantkit
    checks = ("test_faketensor", "test_autograd_registration")  # test_schema lacks float8 on CPU
    for op, inputs in (
        (quantkit.fp8_linear, (x, *arguments)),
        (quantkit.fp8_gated_linear, (x, *arguments, "silu")),
        (quantkit.dequantize_weight, (weight, scale, 16, torch.float16)),
        (quantkit.gate_mul, (x, "silu")),
    ):
        torch.library.opcheck(op.default, inputs, test_utils=checks)


def test_a_missing_or_broken_library_leaves_the_reference_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTKIT_DISABLE_EXT", raising=False)
    assert not extension.load_extension(tmp_path)
    assert not caplog.records
    (tmp_path / "_cpu.abi3.so").write_bytes(b"not a library")
    assert not extension.load_extension(tmp_path)
    assert "using slow reference kernels" in caplog.text


def run_python(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUANTKIT_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | variables,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )


OTHER_KERNELS = {
    "portable": {"QUANTKIT_CPU_ISA": "portable"},
    "avx2": {"QUANTKIT_CPU_ISA": "avx2"},
    "avx512": {"QUANTKIT_CPU_ISA": "avx512"},
    "avx512bf16": {"QUANTKIT_CPU_ISA": "avx512bf16"},
    "avx512fp16": {"QUANTKIT_CPU_ISA": "avx512fp16"},
    "reference": {"QUANTKIT_DISABLE_EXT": "1"},
}


@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="nothing to choose from")
@pytest.mark.parametrize("share", ["a third", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", OTHER_KERNELS)
def test_other_kernels_pass_the_same_tests(kernels: str, share: str) -> None:
    names = (
        "test_ops.py",
        "test_outlier_ops.py",
        "test_dense_ops.py",
        "test_attention_ops.py",
        "test_attention_kernels.py",
        "test_decoder_ops.py",
        "test_head_ops.py",
        "test_expert_ops.py",
        "test_probe_ops.py",
        "test_sampling_ops.py",
        "test_rounding_ops.py",
        "test_moment_ops.py",
    )
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in names)]
    pytest_again = [
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        "not other_kernels and not fake and not in_a_process",
        *files,
    ]
    if share != "all":
        pytest_again += ["-p", "tests.one_in_three"]
    # Each of them another third: what only one instruction set gets wrong is met sooner or later.
    variables = {"ONE_IN_THREE": str(list(OTHER_KERNELS).index(kernels))}
    result = run_python(pytest_again, OMP_NUM_THREADS="1", **variables, **OTHER_KERNELS[kernels])
    assert result.returncode == 0, result.stdout + result.stderr


REFUSE_TILES = """
import ctypes, struct, torch
from torch import float8_e4m3fn, ones, randn
# A filter of system calls: arch_prctl(ARCH_REQ_XCOMP_PERM, ...) fails with EPERM, all others pass.
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023),
        (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(program)
header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0
from quantkit import ops
x, weight = randn(20, 64).bfloat16(), ones(32, 64).to(float8_e4m3fn)
assert not ops.multiplies_many_rows(x, weight, 64)
y = torch.ops.quantkit.fp8_linear(x, weight, ones(32, 1), None, 64)
assert (y.float() - x.float().sum(1, keepdim=True)).abs().max() < 0.1
print("refused")
"""


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="AMX is x86's"
)
@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="nothing would ask for it")
def test_in_a_process_whose_tiles_are_refused_they_are_not_used() -> None:
    result = run_python(["-c", REFUSE_TILES])
    assert result.stdout == "refused\n", result.stderr


@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no extension reads it")
def test_in_a_process_of_an_unknown_instruction_set_there_is_an_error() -> None:
    script = (
        "import torch; from quantkit import ops;"
        "w = torch.zeros(1, 1, dtype=torch.uint8);"
        "ops.dequantize_weight(w, torch.ones(1, 1), 1, torch.float32)"
    )
    result = run_python(["-c", script], QUANTKIT_CPU_ISA="avx9")
    assert (
        "QUANTKIT_CPU_ISA must be portable, avx2, avx512, avx512bf16, avx512fp16 or amx, got 'avx9'"
        in result.stderr
    )
