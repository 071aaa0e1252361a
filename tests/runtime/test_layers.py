"""FP8 and plain linears: stacking, biases, empty inputs, quantized inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.attention_ops import rms_norm
from quantkit.errors import CheckpointError
from quantkit.numerics import E3M4, E4M3, amax_to_scale, fake_quantize, quantize, tile_amax
from quantkit.quantized_weight import QuantizedWeight
from quantkit.runtime.layers import DenseLinear, Fp8Linear, InputQuantizer, check_codes
from quantkit.runtime.mlp import GatedMlp, PlainMlp
from quantkit.runtime.norms import LayerNorm, RmsNorm
from quantkit.scheme import Granularity, QuantSpec

SPECS = {
    "tensor": QuantSpec(Granularity.TENSOR),
    "channel": QuantSpec(Granularity.CHANNEL),
    "block": QuantSpec(Granularity.BLOCK, block_shape=(128, 128)),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
FEW_AND_MANY = pytest.mark.parametrize("num_tokens", [1, 5, 40])


def quantized(
    rows: int, columns: int, spec: QuantSpec, bias: bool = False, input_scale: float | None = None
) -> QuantizedWeight:
    weight = torch.randn(rows, columns) * torch.rand(rows, 1)
    tile = spec.tile(rows, columns)
    grid = amax_to_scale(tile_amax(weight, tile), E4M3)
    return QuantizedWeight(
        codes=quantize(weight, grid, E4M3, tile),
        scale=grid.reshape(spec.scale_shape(rows, columns)),
        spec=spec,
        bias=torch.randn(rows) * 50 if bias else None,
        input_scale=None if input_scale is None else torch.tensor([input_scale]),
    )


def plain(x: Tensor, weights: list[QuantizedWeight]) -> Tensor:
    """Each layer on its own, on dequantized weights."""
    return torch.cat([F.linear(x, w.dequantize(), w.bias) for w in weights], dim=1)


@EVERY_SPEC
@FEW_AND_MANY
def test_a_stack_gives_its_members_outputs_side_by_side(spec: QuantSpec, num_tokens: int) -> None:
    # 130 rows: with blocks the second layer begins in the middle of one of the stack's.
    weights = [quantized(130, 200, spec), quantized(32, 200, spec), quantized(15, 200, spec)]
    x = torch.randn(num_tokens, 200)
    # Sums of 200 products in two orders: each rounds by at most 200 halves of a last bit of what
    # the absolute values sum up to.
    sizes = torch.cat([x.abs() @ w.dequantize().abs().t() for w in weights], dim=1)
    error = (Fp8Linear.stack(weights, None)(x) - plain(x, weights)).abs()
    assert bool((error <= 200 * torch.finfo(torch.float32).eps * sizes).all())


@EVERY_SPEC
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_input_gives_exactly_the_bias(spec: QuantSpec, dtype: torch.dtype) -> None:
    weights = [quantized(15, 32, spec, bias=True), quantized(7, 32, spec)]
    bias = torch.cat([weights[0].bias, torch.zeros(7)]).to(dtype)
    layer = Fp8Linear.stack(weights, None)
    for num_tokens in (1, 3, 40):
        out = layer(torch.zeros(num_tokens, 32, dtype=dtype))
        assert torch.equal(out, bias.expand(num_tokens, -1))


INPUTS = {
    "full": None,
    "token": QuantSpec(Granularity.TOKEN, dynamic=True),
    "static": QuantSpec(Granularity.TENSOR),
    "group": QuantSpec(Granularity.GROUP, group_size=128, dynamic=True),
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_no_rows_in_no_rows_out(inputs: QuantSpec | None) -> None:
    spec = SPECS["channel"]
    layer = Fp8Linear.stack([quantized(6, 200, spec, input_scale=0.5)] * 2, inputs)
    assert layer(torch.empty(0, 200)).shape == (0, 12)
    assert layer.gated(torch.empty(0, 200), "silu").shape == (0, 6)


@FEW_AND_MANY
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_mlp_equals_its_definition(activation: str, num_tokens: int) -> None:
    spec = SPECS["channel"]
    gate, up, down = quantized(100, 72, spec), quantized(100, 72, spec), quantized(72, 100, spec)
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }[activation]
    hidden, norm = torch.randn(num_tokens, 72), torch.rand(72) + 0.5
    delta = torch.randn(num_tokens, 72)
    x = rms_norm(hidden + delta, norm, 1e-6)
    expected = plain(act(plain(x, [gate])) * plain(x, [up]), [down])
    fp8 = GatedMlp(Fp8Linear.stack([gate, up], None), Fp8Linear.stack([down], None), activation)
    dense = GatedMlp(
        DenseLinear(torch.cat([gate.dequantize(), up.dequantize()])),
        DenseLinear(down.dequantize()),
        activation,
    )
    for mlp in (fp8, dense):
        total, got = mlp.after_add_norm(hidden, delta, RmsNorm(norm, 1e-6))
        assert torch.equal(total, hidden + delta)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@FEW_AND_MANY
def test_plain_mlp_after_a_layer_norm_equals_its_definition(num_tokens: int) -> None:
    up, down = quantized(100, 72, SPECS["channel"]), quantized(72, 100, SPECS["channel"])
    mlp = PlainMlp(Fp8Linear.stack([up], None), Fp8Linear.stack([down], None), "gelu_tanh")
    hidden, delta = torch.randn(num_tokens, 72) + 3, torch.randn(num_tokens, 72)
    norm = LayerNorm(torch.rand(72) + 0.5, torch.randn(72), 1e-5)
    x = (hidden + delta).double()
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    normed = (x * norm.weight + norm.bias).float()
    expected = plain(F.gelu(plain(normed, [up]), approximate="tanh"), [down])
    total, got = mlp.after_add_norm(hidden, delta, norm)
    assert torch.equal(total, hidden + delta)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(mlp.after_add_norm(hidden, delta, None)[1], mlp(hidden + delta))


def test_layers_that_share_an_input_use_the_largest_input_scale() -> None:
    spec = SPECS["tensor"]
    weights = [quantized(8, 32, spec, input_scale=s) for s in (0.125, 0.5, 0.25)]
    layer = Fp8Linear.stack(weights, INPUTS["static"])
    x = torch.randn(3, 32) * 100
    rounded = fake_quantize(x, torch.tensor([[0.5]]), E4M3, (3, 32))
    torch.testing.assert_close(layer(x), plain(rounded, weights))


@pytest.mark.parametrize("kind", ["token", "group"])
def test_dynamic_input_scales_do_not_mix_rows(kind: str) -> None:
    spec = INPUTS[kind]
    assert spec is not None
    x = torch.randn(4, 300)
    alone = InputQuantizer(spec)(x[1:2])
    x[0] *= 1000
    assert torch.equal(InputQuantizer(spec)(x)[1:2], alone)


@pytest.mark.parametrize("kind", ["token", "group"])
def test_dynamic_input_quantization_is_within_half_a_step(kind: str) -> None:
    spec = INPUTS[kind]
    assert spec is not None
    x = torch.randn(4, 300) * torch.tensor([[1e-3], [1], [1e3], [0]])
    error = (InputQuantizer(spec)(x) - x).abs()
    assert (error <= x.abs() * 2**-4 + x.abs().amax(dim=1, keepdim=True) * 2**-10 / 448).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_named_with_its_place(code: int) -> None:
    codes = torch.full((3, 5), 0x7E, dtype=torch.uint8)
    check_codes("layer.weight", codes.view(torch.float8_e4m3fn), E4M3)
    codes[2, 4] = code
    with pytest.raises(CheckpointError, match=r"layer\.weight has a NaN at \[2, 4\]"):
        check_codes("layer.weight", codes.view(torch.float8_e4m3fn), E4M3)


@pytest.mark.parametrize("place", [0, 7, 8, 63, 64, 66])
@pytest.mark.parametrize("shape", [(67, 1), (1, 67)])
def test_a_nan_is_found_wherever_it_is(shape: tuple[int, int], place: int) -> None:
    whole = torch.randint(0, 0x7F, (69,), dtype=torch.uint8)
    whole[::2] |= 0x80
    whole[whole == 0xFF] = 0
    for offset in (0, 1):
        codes = whole[offset : offset + 67].view(shape)
        check_codes("w", codes.view(E4M3.dtype), E4M3)
        before = int(codes.view(-1)[place])
        codes.view(-1)[place] = 0xFF
        with pytest.raises(CheckpointError, match=r"w has a NaN"):
            check_codes("w", codes.view(E4M3.dtype), E4M3)
        codes.view(-1)[place] = before


def test_infinite_codes_are_damage_too() -> None:
    codes = torch.full((3, 5), 0x6F, dtype=torch.uint8)
    check_codes("layer.weight", codes, E3M4)
    codes[1, 0] = 0x70
    with pytest.raises(CheckpointError, match=r"has a NaN or infinity at \[1, 0\]"):
        check_codes("layer.weight", codes, E3M4)


def test_a_single_layer_is_not_copied() -> None:
    weight = quantized(8, 32, SPECS["channel"])
    assert Fp8Linear.stack([weight], None).codes.data_ptr() == weight.codes.data_ptr()
