"""Ops between linear layers: each equals the plain ops it stands for, bit for bit."""

from __future__ import annotations

import pytest
import torch

from quantkit import row_ops
from quantkit.attention_ops import kv_append, rms_norm, rotary
from quantkit.cache_ops import kv_gather, rotary_append
from quantkit.errors import UnsupportedError
from quantkit.gate_ops import gate_mul
from quantkit.numerics import E4M3, fake_quantize
from quantkit.row_ops import QuantizedRows
from quantkit.runtime import scaled_linear
from quantkit.runtime.layers import Fp8Linear, InputQuantizer
from quantkit.runtime.mlp import GatedMlp
from quantkit.runtime.norms import RmsNorm
from quantkit.runtime.scaled_linear import ScaledLinear
from quantkit.scaled_ops import scaled_gated_mm, scaled_mm
from quantkit.scheme import Granularity, QuantSpec
from tests import reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SCALES = pytest.mark.parametrize("scale", [None, torch.tensor([0.02])], ids=["dynamic", "static"])


def values(rows: QuantizedRows) -> torch.Tensor:
    return rows.codes.float() * rows.scales.view(-1, 1)


@DTYPES
@SCALES
@pytest.mark.parametrize("count", [0, 1, 5])
def test_quantized_rows_are_what_fake_quantize_leaves(
    dtype: torch.dtype, scale: torch.Tensor | None, count: int
) -> None:
    x = torch.randn(count, 24).to(dtype) * torch.tensor([1e-3, 1.0, 50.0]).repeat(8).to(dtype)
    rows = row_ops.quantize_rows(x, scale)
    assert rows.scales.shape == ((count,) if scale is None else (1,))
    if count == 0:
        return
    if scale is None:
        grid, tile = rows.scales.view(-1, 1), (1, 24)
        assert torch.equal(rows.codes.float().abs().amax(1) > 440, torch.ones(count) > 0)
    else:
        grid, tile = scale.view(1, 1), (count, 24)
    assert torch.equal(values(rows).to(dtype), fake_quantize(x, grid, E4M3, tile))


@DTYPES
@SCALES
def test_fused_norms_equal_one_op_after_another(
    dtype: torch.dtype, scale: torch.Tensor | None
) -> None:
    x, delta = torch.randn(2, 3, 40).to(dtype)
    weight = torch.rand(40).to(dtype) + 0.5
    total = x + delta
    normed = rms_norm(total, weight, 1e-5)
    assert all(map(torch.equal, row_ops.add_rms_norm(x, delta, weight, 1e-5), (total, normed)))
    expected = row_ops.quantize_rows(normed, scale)
    got_total, got = row_ops.add_rms_norm_quantize(x, delta, weight, 1e-5, scale)
    assert torch.equal(got_total, total)
    alone = row_ops.rms_norm_quantize(total, weight, 1e-5, scale)
    for rows in (got, alone):
        assert torch.equal(rows.codes.float(), expected.codes.float())
        assert torch.equal(rows.scales, expected.scales)


@DTYPES
@SCALES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gating_equals_the_oracle(
    dtype: torch.dtype, scale: torch.Tensor | None, activation: str
) -> None:
    both = torch.randn(4, 48).to(dtype)
    exact = torch.from_numpy(reference.gated(both.double().numpy(), activation))
    gated = gate_mul(both, activation)
    # One rounding to the dtype, and a few units of float32 in the activation.
    unit = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert ((gated.double() - exact).abs() <= unit * exact.abs() + 1e-7).all()
    expected, rows = row_ops.quantize_rows(gated, scale), None
    rows = row_ops.gate_mul_quantize(both, activation, scale)
    assert torch.equal(rows.codes.float(), expected.codes.float())
    assert torch.equal(rows.scales, expected.scales)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rotary_append_equals_one_op_after_another(norm: bool, turn: bool, tokens: int) -> None:
    heads, kv_heads, dim = 6, 2, 8
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).bfloat16()
    q_norm, k_norm = (torch.rand(2, dim).bfloat16() + 0.5).unbind() if norm else (None, None)
    angles = tuple(torch.randn(2, tokens, dim).bfloat16()) if turn else None
    caches = [torch.zeros(3, 4, kv_heads, dim).to(E4M3.dtype) for _ in range(4)]
    scales = torch.tensor([0.01]), torch.tensor([0.02, 0.03])
    slots = torch.randperm(12)[:tokens]
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    if norm:
        query, key = rms_norm(query, q_norm, 1e-6), rms_norm(key, k_norm, 1e-6)
    if angles:
        query, key = rotary(query, *angles), rotary(key, *angles)
    kv_append(key, value, *caches[:2], *scales, slots)
    got = rotary_append(qkv, q_norm, k_norm, 1e-6, angles, *caches[2:], *scales, slots, heads)
    assert torch.equal(got, query)
    assert got.data_ptr() != qkv.data_ptr()
    for expected, actual in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))


@pytest.mark.parametrize("scale", [torch.tensor([0.5]), torch.tensor([0.25, 2.0])])
def test_gathered_tokens_are_the_stored_values_in_order(scale: torch.Tensor) -> None:
    codes = torch.randint(0, 0x7F, (5, 4, 2, 8), dtype=torch.uint8).view(E4M3.dtype)
    got = kv_gather(codes, scale, torch.tensor([3, 1]).int(), 6, torch.float32)
    flat = torch.cat((codes.view(torch.uint8)[3], codes.view(torch.uint8)[1]))[:6].numpy()
    exact = reference.float8_values("e4m3")[flat] * scale.double().numpy().reshape(-1, 1)
    assert torch.equal(got.double(), torch.from_numpy(exact))
    plain = kv_gather(codes.float(), None, torch.tensor([3, 1]).int(), 6, torch.bfloat16)
    assert torch.equal(
        plain.float(), torch.from_numpy(reference.float8_values("e4m3")[flat]).float()
    )


@pytest.mark.parametrize("activation", ["none", "silu", "relu"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_scaled_mm_equals_the_oracle(activation: str, count: int) -> None:
    rows = row_ops.quantize_rows(torch.randn(count, 32))
    weight = torch.randint(0, 0x7F, (48, 32), dtype=torch.uint8)
    scale, bias = torch.rand(48) / 448, torch.randn(48)
    values8 = reference.float8_values("e4m3")
    exact = values8[rows.codes.view(torch.uint8).numpy()] @ values8[weight.numpy()].T
    exact = exact * rows.scales.double().numpy()[:, None] * scale.double().numpy()
    exact = exact + bias.double().numpy()
    if activation != "none":
        ones = torch.ones(count, 48).double().numpy()
        both = torch.from_numpy(exact), torch.from_numpy(ones)
        exact = reference.gated(torch.cat(both, 1).numpy(), activation)
    got = scaled_mm(rows, weight.view(E4M3.dtype), scale, bias, torch.float32, activation)
    # float32 sums of 32 products of about 10 each.
    torch.testing.assert_close(got.double(), torch.from_numpy(exact), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_scaled_gated_mm_equals_the_oracle(activation: str, count: int) -> None:
    rows = row_ops.quantize_rows(torch.randn(count, 32))
    weight = torch.randint(0, 0x7F, (48, 32), dtype=torch.uint8)
    scale, bias = torch.rand(48) / 4480, torch.randn(48)
    values8 = reference.float8_values("e4m3")
    exact = values8[rows.codes.view(torch.uint8).numpy()] @ values8[weight.numpy()].T
    exact = exact * rows.scales.double().numpy()[:, None] * scale.double().numpy()
    exact = torch.from_numpy(reference.gated(exact + bias.double().numpy(), activation))
    arguments = (rows, weight.view(E4M3.dtype), scale, bias, torch.float32, activation)
    # float32 sums of 32 products of about 1 each, and their product.
    torch.testing.assert_close(scaled_gated_mm(*arguments).double(), exact, rtol=1e-5, atol=1e-4)
    with pytest.raises(UnsupportedError, match="activation must be silu"):
        scaled_gated_mm(*arguments[:-1], "none")


@pytest.mark.parametrize("static", [False, True])
def test_gating_where_the_product_is_changes_roundings_only(
    static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference kernel stands in for the GPU's; both ways around the choice of one."""
    calls = []
    op = scaled_linear.scaled_gated_mm
    monkeypatch.setattr(
        scaled_linear, "scaled_gated_mm", lambda *given: (calls.append(given), op(*given))[1]
    )
    monkeypatch.setattr(scaled_linear, "gates_in_product", lambda _: True)
    layers = [scaled_layer(out, columns, static) for out, columns in ((48, 32), (32, 24))]
    mlp = GatedMlp(*layers, "silu")
    hidden, delta = torch.randn(2, 6, 32).bfloat16()
    norm = RmsNorm(torch.ones(32).bfloat16(), 1e-5)
    two_kernels = mlp.after_add_norm(hidden, delta, norm), mlp(hidden)
    assert not calls
    monkeypatch.setattr(scaled_linear, "FUSED_GATE_FROM", 6)
    fused = mlp.after_add_norm(hidden, delta, norm), mlp(hidden)
    assert len(calls) == 2
    assert torch.equal(fused[0][0], two_kernels[0][0])
    for got, want in ((fused[0][1], two_kernels[0][1]), (fused[1], two_kernels[1])):
        # One rounding to bfloat16 less: codes of 3 bits may differ by one step now and then.
        assert (got - want).norm() <= 2.0**-4 * want.norm()
    mlp(hidden[:5])  # fewer than from where it is worth it
    assert len(calls) == 2


def test_scaled_mm_names_a_bad_argument() -> None:
    rows = row_ops.quantize_rows(torch.randn(3, 32))
    weight, scale = torch.zeros(16, 32).to(E4M3.dtype), torch.ones(16)
    for bad, message in (
        ((rows, torch.zeros(24, 32).to(E4M3.dtype), torch.ones(24)), "N a multiple of 16, got 24"),
        (
            (QuantizedRows(rows.codes.float(), rows.scales), weight, scale),
            "a must be float8_e4m3fn",
        ),
        (
            (rows, weight, torch.ones(15)),
            r"weight_scale must be of shape \[N\] = \[16\], got \[15\]",
        ),
        (
            (QuantizedRows(rows.codes, torch.ones(2)), weight, scale),
            r"a_scale must be of shape \[M\] or \[1\] = \[3\]",
        ),
    ):
        with pytest.raises(UnsupportedError, match=message):
            scaled_mm(*bad, None, torch.float32)


def plain_layer(out: int, columns: int, static: bool) -> Fp8Linear:
    codes = torch.randint(0, 0x70, (out, columns), dtype=torch.uint8).view(E4M3.dtype)
    granularity = Granularity.TENSOR if static else Granularity.TOKEN
    scale = torch.tensor([0.02]) if static else None
    inputs = InputQuantizer(QuantSpec(granularity=granularity, dynamic=not static), scale)
    return Fp8Linear(codes, torch.rand(out, 1) / 448, columns, torch.randn(out), inputs)


def scaled_layer(out: int, columns: int, static: bool) -> ScaledLinear:
    layer = ScaledLinear.wrap(plain_layer(out, columns, static), few_rows=4)
    assert layer is not None
    return layer


@pytest.mark.parametrize(("out", "columns"), [(32, 48), (20, 40), (1, 16)])
@pytest.mark.parametrize("static", [False, True])
def test_a_scaled_linear_multiplies_what_the_input_quantizer_leaves(
    out: int, columns: int, static: bool
) -> None:
    layer = plain_layer(out, columns, static)
    scaled = ScaledLinear.wrap(layer, few_rows=4)
    assert scaled is not None
    x = torch.randn(6, columns)
    torch.testing.assert_close(scaled(x), layer(x), rtol=1e-5, atol=1e-4)
    few = x[:4]
    assert torch.equal(scaled(few), layer.without_input_quantizer()(few))
    assert scaled.scaled(4) is None
    assert scaled.scaled(5) is scaled


def test_a_layer_that_does_not_fit_is_not_wrapped() -> None:
    codes = torch.zeros(4, 32).to(E4M3.dtype)
    group = QuantSpec(granularity=Granularity.GROUP, dynamic=True, group_size=16)
    token = InputQuantizer(QuantSpec(granularity=Granularity.TOKEN, dynamic=True))
    assert ScaledLinear.wrap(Fp8Linear(codes, torch.ones(4, 1), 32), 4) is None
    by_group = Fp8Linear(codes, torch.ones(4, 1), 32, inputs=InputQuantizer(group))
    assert ScaledLinear.wrap(by_group, 4) is None
    assert ScaledLinear.wrap(Fp8Linear(codes, torch.ones(4, 2), 16, inputs=token), 4) is None
    e3m4 = Fp8Linear(codes.view(torch.uint8), torch.ones(4, 1), 32, inputs=token)
    assert ScaledLinear.wrap(e3m4, 4) is None
