"""Kernels on rows, on the GPU, give the bits of the reference kernels on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit import row_ops
from quantkit.attention_ops import rms_norm, rotary
from quantkit.gate_ops import gate_mul

DEVICE = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
WIDTHS = pytest.mark.parametrize("width", [8, 64, 576, 1000, 4096, 14336, 333])
COUNTS = pytest.mark.parametrize("count", [0, 1, 3, 257])


def same_bits(actual: Tensor, expected: Tensor, flips: float = 0.0) -> None:
    """Compare bits; `flips` is the share of elements that may be a neighbouring value."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    different = actual.cpu().contiguous().view(kind) != expected.contiguous().view(kind)
    assert actual.shape == expected.shape
    assert int(different.sum()) <= flips * different.numel() + (2 if flips else 0)


@DTYPES
@WIDTHS
@COUNTS
@pytest.mark.parametrize("static", [False, True])
def test_quantize_rows(count: int, width: int, dtype: torch.dtype, static: bool) -> None:
    x = (torch.randn(count, width) * torch.logspace(-4, 4, width)).to(dtype)
    scale = torch.tensor([0.5]) if static else None
    expected = row_ops.quantize_rows(x, scale)
    actual = row_ops.quantize_rows(x.to(DEVICE), None if scale is None else scale.to(DEVICE))
    same_bits(actual.scales, expected.scales)
    same_bits(actual.codes, expected.codes)


@DTYPES
@WIDTHS
@COUNTS
def test_norms(count: int, width: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, count, width).to(dtype)
    weight = (torch.rand(width) + 0.5).to(dtype)
    on_gpu = [tensor.to(DEVICE) for tensor in (x, delta, weight)]
    # The mean of the squares is summed in another order, so that a tie may round the other way.
    same_bits(rms_norm(on_gpu[0], on_gpu[2], 1e-5), rms_norm(x, weight, 1e-5), flips=2e-3)
    total, normed = row_ops.add_rms_norm(*on_gpu, 1e-5)
    same_bits(total, x + delta)
    same_bits(normed, rms_norm(x + delta, weight, 1e-5), flips=2e-3)
    assert torch.equal(normed, rms_norm(total, on_gpu[2], 1e-5))
    for scale in (None, torch.tensor([0.01], device=DEVICE)):
        expected = row_ops.quantize_rows(normed, scale)
        again, rows = row_ops.add_rms_norm_quantize(*on_gpu, 1e-5, scale)
        alone = row_ops.rms_norm_quantize(total, on_gpu[2], 1e-5, scale)
        assert torch.equal(again, total)
        for got in (rows, alone):
            same_bits(got.scales, expected.scales.cpu())
            same_bits(got.codes, expected.codes.cpu())


@DTYPES
@COUNTS
@pytest.mark.parametrize("inner", [4, 96, 1000, 14336, 77])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gating(activation: str, inner: int, count: int, dtype: torch.dtype) -> None:
    both = torch.randn(count, 2 * inner).to(dtype)
    actual = gate_mul(both.to(DEVICE), activation)
    same_bits(actual, gate_mul(both, activation), flips=2e-3)
    for scale in (None, torch.tensor([0.01], device=DEVICE)):
        expected = row_ops.quantize_rows(actual, scale)
        rows = row_ops.gate_mul_quantize(both.to(DEVICE), activation, scale)
        same_bits(rows.scales, expected.scales.cpu())
        same_bits(rows.codes, expected.codes.cpu())


@DTYPES
@pytest.mark.parametrize("head_dim", [10, 64, 128, 256])
def test_rotary(head_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 6, head_dim).to(dtype)
    half = torch.randn(2, 5, head_dim // 2).to(dtype)
    cos, sin = torch.cat((half, half), dim=-1)
    same_bits(rotary(x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE)), rotary(x, cos, sin))


@DTYPES
@WIDTHS
def test_norms_with_a_float32_weight(width: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, 5, width).to(dtype)
    weight = torch.rand(width) + 0.5
    on_gpu = [tensor.to(DEVICE) for tensor in (x, delta, weight)]
    total, normed = row_ops.add_rms_norm(*on_gpu, 1e-5)
    same_bits(total, x + delta)
    exact = total.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * on_gpu[2].double()
    half_step = torch.finfo(dtype).eps / 2  # one rounding, and float32 before it
    allowed = exact.abs() * (half_step + 1e-6) + 6e-8
    assert ((normed.double() - exact).abs() <= allowed).all()
    assert torch.equal(normed, rms_norm(total, on_gpu[2], 1e-5))
    rows = row_ops.rms_norm_quantize(total, on_gpu[2], 1e-5, None)
    expected = row_ops.quantize_rows(normed, None)
    same_bits(rows.codes, expected.codes.cpu())
    same_bits(rows.scales, expected.scales.cpu())


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), (80, 20), (128, 64), (100, 48)])
def test_partial_rotary(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 6, head_dim, device=DEVICE).to(dtype)
    cos, sin = torch.randn(2, 5, rotary_dim, device=DEVICE).to(dtype)
    first, rest = x.split([rotary_dim, head_dim - rotary_dim], dim=-1)
    turned = rotary(first.contiguous(), cos, sin)
    same_bits(rotary(x, cos, sin), torch.cat((turned, rest), dim=-1).cpu())
