"""Products with scales for blocks of 128 x 128 weights: the op's reference, and the layer of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit import numerics
from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.errors import UnsupportedError
from quantkit.numerics import E4M3
from quantkit.row_ops import QuantizedRows
from quantkit.runtime.block_linear import BlockLinear, codes_from
from quantkit.runtime.layers import Fp8Linear, InputQuantizer
from quantkit.scheme import Granularity, QuantSpec
from tests import reference

GROUPS = QuantSpec(granularity=Granularity.GROUP, group_size=BLOCK, dynamic=True)
FLOAT32 = 2.0**-24


def random_weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8) << 7
    return codes.view(E4M3.dtype), torch.rand(-(-rows // BLOCK), columns // BLOCK) * 0.01


def test_groups_of_inputs_have_scales_of_their_own() -> None:
    x = torch.randn(5, 384) * torch.logspace(-3, 3, 3).repeat_interleave(BLOCK)
    x[2, :BLOCK] = 0
    got = quantize_groups(x)
    scale = numerics.amax_to_scale(numerics.tile_amax(x, (1, BLOCK)), E4M3)
    assert torch.equal(got.scales, scale)
    codes = numerics.quantize(x, scale, E4M3, (1, BLOCK))
    assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8))
    assert quantize_groups(x[:0]).scales.shape == (0, 3)
    with pytest.raises(UnsupportedError, match="groups of 128 columns do not fit 100"):
        quantize_groups(torch.randn(2, 100))


@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize(("out", "columns"), [(128, 128), (272, 384), (16, 256)])
def test_the_product_equals_the_oracle(out: int, columns: int, count: int) -> None:
    weight, scale = random_weight(out, columns)
    rows, bias = quantize_groups(torch.randn(count, columns)), torch.randn(out)
    got = block_scaled_mm(rows, weight, scale, bias, torch.float32)
    x = reference.dequantize(
        rows.codes.view(torch.uint8).numpy(), rows.scales.double().numpy(), "e4m3", (1, BLOCK)
    )
    w = reference.dequantize(
        weight.view(torch.uint8).numpy(), scale.double().numpy(), "e4m3", (BLOCK, BLOCK)
    )
    # A sum of K rounded products of rounded factors: K + 4 roundings of its magnitude at most.
    bound = (columns + 4) * FLOAT32 * (abs(x) @ abs(w).T + bias.double().abs().numpy())
    error = (got.double() - torch.from_numpy(x @ w.T + bias.double().numpy())).abs()
    assert (error <= torch.from_numpy(bound)).all()


def test_a_bad_argument_is_named() -> None:
    weight, scale = random_weight(32, 256)
    rows = quantize_groups(torch.randn(3, 256))
    narrow = quantize_groups(torch.randn(3, 128))
    for bad, message in (
        ((rows, *random_weight(24, 256)), "N a multiple of 16, got 24"),
        ((narrow, weight, scale), r"a must be of shape \[M, K\] = \[any, 256\], got \[3, 128\]"),
        ((rows, weight.float(), scale), "weight must be float8_e4m3fn, got float32"),
        ((rows, weight, scale.double()), "weight_scale must be float32, got float64"),
        ((rows, weight, scale[:, :1].contiguous()), r"weight_scale .*\[1, 2\], got \[1, 1\]"),
        ((QuantizedRows(rows.codes, rows.scales[:, :1]), weight, scale), "a_scale must be of"),
        ((rows, weight[:, :192].contiguous(), scale), "K a multiple of 128|a must be"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            block_scaled_mm(*bad, None, torch.bfloat16)  # type: ignore[arg-type]


def test_the_op_can_be_traced() -> None:
    weight, scale = random_weight(32, 256)
    rows = quantize_groups(torch.randn(4, 256))
    arguments = (rows.codes, rows.scales.T.contiguous(), weight, scale, None, torch.bfloat16)
    checks = ("test_faketensor",)  # that of the schema multiplies, which 8-bit floats cannot
    torch.library.opcheck(torch.ops.quantkit.block_scaled_mm.default, arguments, test_utils=checks)


def random_layer(rows: int, columns: int) -> Fp8Linear:
    codes, blocks = random_weight(rows, columns)
    scale = blocks.repeat_interleave(BLOCK, dim=0)[:rows]
    return Fp8Linear(codes, scale, BLOCK, torch.randn(rows), InputQuantizer(GROUPS))


def test_a_layer_multiplies_what_its_input_quantizer_leaves() -> None:
    layer = random_layer(288, 256)
    wrapped = BlockLinear.wrap(layer, 5)
    assert wrapped is not None
    for count in (1, 4, 5, 9):
        x = torch.randn(count, 256)
        expected = layer(x) if count >= 5 else layer.without_input_quantizer()(x)
        # The same factors; float32 sums in another order.
        torch.testing.assert_close(wrapped(x), expected, rtol=1e-5, atol=1e-4)
        gated = wrapped.gated(x, "silu")
        gate, up = expected.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(gated, exact, rtol=1e-4, atol=1e-3)


def test_other_layers_stay_as_they_are() -> None:
    layer = random_layer(288, 256)
    token = InputQuantizer(QuantSpec(granularity=Granularity.TOKEN, dynamic=True))
    shifted = torch.cat((layer.scale[64:], layer.scale[:64]))
    for other in (
        replace(layer, inputs=None),
        replace(layer, inputs=token),
        replace(layer, group_size=64, scale=layer.scale.repeat_interleave(2, dim=1)),
        replace(layer, scale=shifted),  # blocks that begin in the middle
        random_layer(280, 256),
    ):
        assert BlockLinear.wrap(other, 1) is None


def test_only_a_gpu_that_can_multiplies_codes() -> None:
    assert codes_from(0, torch.device("cpu")) is None
