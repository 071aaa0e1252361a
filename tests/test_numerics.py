"""Formats, scales and tiles against ml_dtypes and against the float64 oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from quantkit import numerics
from quantkit.errors import UnsupportedError
from quantkit.numerics import (
    E3M4,
    E4M3,
    E5M2,
    FORMATS,
    MIN_SCALE,
    Format,
    amax_to_scale,
    decode,
    dequantize,
    encode,
    expand_scale,
    fake_quantize,
    quantize,
    tile_amax,
)
from tests import reference

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
}
EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
EDGES = [448.0, 464.0, 465.0, 480.0, 1e3, 3e38, float("inf")]


def bits(codes: Tensor) -> NDArray[np.uint8]:
    return codes.view(torch.uint8).numpy()


def all_codes(fmt: Format) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype)


def adversarial_floats(fmt: Format) -> NDArray[np.float32]:
    """Every value, every midpoint, and the floats next to each; subnormals; beyond the range."""
    values = reference.float8_values(fmt.name)[:128]
    values = values[np.isfinite(values)]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    edge = np.float32(fmt.max)
    points = np.concatenate(
        [
            points,
            np.nextafter(points, np.float32(np.inf)),
            np.nextafter(points, np.float32(-np.inf)),
            np.array([1e-45, 1e-40, 2.0**-126, 2.0**-149], np.float32),
            edge * np.array([1.01, 1.03125, 1.0357, 1.07, 2, 1e6], np.float32),
            np.array(EDGES, np.float32),
        ]
    )
    return np.concatenate([points, -points])


def assert_same_codes(actual: Tensor, expected: NDArray[np.uint8], fmt: Format) -> None:
    """Equal bit for bit, except that any NaN code is as good as another."""
    nan = np.isnan(reference.float8_values(fmt.name))
    np.testing.assert_array_equal(nan[bits(actual)], nan[expected])
    np.testing.assert_array_equal(bits(actual)[~nan[expected]], expected[~nan[expected]])


@EVERY_FORMAT
def test_format_fields_follow_from_the_definition(fmt: Format) -> None:
    assert fmt.max == reference.float8_max(fmt.name)
    assert fmt.exponent_bits + fmt.mantissa_bits == 7


@EVERY_FORMAT
def test_all_256_codes_decode_as_the_definition_and_ml_dtypes_say(fmt: Format) -> None:
    values = decode(all_codes(fmt), fmt)
    assert values.dtype == torch.float32
    theirs = np.arange(256, dtype=np.uint8).view(ML_DTYPES[fmt.name]).astype(np.float64)
    np.testing.assert_array_equal(values.double().numpy(), theirs)
    np.testing.assert_array_equal(values.double().numpy(), reference.float8_values(fmt.name))
    np.testing.assert_array_equal(np.signbit(values.numpy()[[0, 128]]), [False, True])


@EVERY_FORMAT
def test_every_finite_code_survives_decoding_and_encoding(fmt: Format) -> None:
    values = decode(all_codes(fmt), fmt)
    finite = values.isfinite()
    again = encode(values, fmt)
    np.testing.assert_array_equal(bits(again)[finite], bits(all_codes(fmt))[finite])


@EVERY_FORMAT
def test_encoding_rounds_adversarial_floats_as_the_oracle_does(fmt: Format) -> None:
    x = adversarial_floats(fmt)
    assert_same_codes(encode(torch.from_numpy(x), fmt), reference.float8_encode(x, fmt.name), fmt)


@EVERY_FORMAT
def test_encoding_agrees_with_ml_dtypes_within_the_range(fmt: Format) -> None:
    x = np.concatenate([adversarial_floats(fmt), random_floats()])
    x = x[np.abs(x) <= fmt.max]
    theirs = x.astype(ML_DTYPES[fmt.name]).view(np.uint8)
    assert_same_codes(encode(torch.from_numpy(x), fmt), theirs, fmt)


def random_floats() -> NDArray[np.float32]:
    """Floats of every sign and magnitude: random bit patterns, and normal numbers."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    normal = generator.standard_normal(200_000).astype(np.float32)
    return np.concatenate([patterns, normal, normal * 100])


@EVERY_FORMAT
def test_encoding_random_bit_patterns_agrees_with_the_oracle(fmt: Format) -> None:
    x = random_floats()
    assert_same_codes(encode(torch.from_numpy(x), fmt), reference.float8_encode(x, fmt.name), fmt)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encoding_other_dtypes_equals_encoding_their_float32(
    fmt: Format, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(adversarial_floats(fmt)).to(dtype)
    np.testing.assert_array_equal(bits(encode(x, fmt)), bits(encode(x.float(), fmt)))


@pytest.mark.parametrize("value", EDGES)
def test_b23_everything_beyond_the_range_saturates(value: float) -> None:
    for fmt in FORMATS.values():
        x = torch.tensor([max(value, fmt.max), -max(value, fmt.max)])
        assert decode(encode(x, fmt), fmt).tolist() == [fmt.max, -fmt.max]


@EVERY_FORMAT
def test_b23_nan_stays_nan_and_zero_keeps_its_sign(fmt: Format) -> None:
    x = torch.tensor([float("nan"), -float("nan"), 0.0, -0.0])
    assert decode(encode(x, fmt), fmt)[:2].isnan().all()
    assert bits(encode(x, fmt))[2:].tolist() == [0x00, 0x80]


@EVERY_FORMAT
def test_encoding_is_monotonic_and_odd(fmt: Format) -> None:
    x = torch.from_numpy(np.sort(random_floats()))
    x = x[~x.isnan()]
    values = decode(encode(x, fmt), fmt)
    assert (values.diff() >= 0).all()
    assert torch.equal(decode(encode(-x, fmt), fmt), -values)


@EVERY_FORMAT
def test_encoding_any_shape_keeps_the_shape(fmt: Format) -> None:
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]:
        codes = encode(torch.zeros(shape), fmt)
        assert (codes.shape, codes.dtype) == (torch.Size(shape), fmt.dtype)
        assert decode(codes, fmt).shape == shape


def test_decoding_the_wrong_storage_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"e4m3 .*float8_e4m3fn.*torch\.uint8"):
        decode(torch.zeros(2, dtype=torch.uint8), E4M3)
    with pytest.raises(UnsupportedError, match="e3m4"):
        decode(torch.zeros(2).to(torch.float8_e5m2), E3M4)


# Scales.


def ulp_bf16(x: Tensor) -> Tensor:
    """Distance to the next bf16 number of a positive normal number."""
    return torch.exp2(torch.floor(torch.log2(x.double())) - 7)


AMAXES = st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=64)


@EVERY_FORMAT
@given(amaxes=AMAXES)
def test_scales_are_positive_bf16_numbers_rounded_up_by_less_than_one_step(
    fmt: Format, amaxes: list[float]
) -> None:
    amax = torch.tensor(amaxes)
    scale = amax_to_scale(amax, fmt)
    assert scale.dtype == torch.float32
    assert (scale.isfinite() & (scale >= MIN_SCALE)).all()
    assert torch.equal(scale, scale.bfloat16().float())
    exact = amax.double() / fmt.max
    normal = exact >= MIN_SCALE
    assert (scale.double() >= exact * (1 - 2.0**-24)).all()
    assert (scale.double() - exact <= ulp_bf16(exact.clamp(min=MIN_SCALE)))[normal].all()
    assert (scale[~normal & (amax > 0)] == MIN_SCALE).all()
    assert (scale[amax == 0] == 1.0).all()


@EVERY_FORMAT
@given(amaxes=AMAXES)
def test_amax_itself_never_saturates(fmt: Format, amaxes: list[float]) -> None:
    amax = torch.tensor(amaxes)
    assert (amax / amax_to_scale(amax, fmt) <= fmt.max).all()


@EVERY_FORMAT
def test_scales_that_are_bf16_numbers_already_stay(fmt: Format) -> None:
    scale = torch.rand(1000).add(0.1).bfloat16().float()
    # 448, 57344 and 15.5 have few bits, so the product is exact in float32, and so is its quotient.
    assert torch.equal(amax_to_scale(scale * fmt.max, fmt), scale)


def test_non_finite_amax_shows_in_the_scale() -> None:
    scale = amax_to_scale(torch.tensor([float("inf"), float("nan")]), E4M3)
    assert scale[0].isinf()
    assert scale[1].isnan()


# Tiles.

TILES = [(1, 1), (1, 4), (1, 1000), (3, 5), (128, 128), (1000, 1000), (4, 1)]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """A matrix and a tile that divides it or does not."""
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    finite = st.floats(-1e4, 1e4, width=32)
    tile = (draw(st.integers(1, 11)), draw(st.integers(1, 11)))
    return draw(hnp.arrays(np.float32, shape, elements=finite)), tile


@EVERY_FORMAT
@settings(max_examples=60)
@given(case=matrices())
def test_tiles_of_any_size_follow_the_oracle_bit_for_bit(
    fmt: Format, case: tuple[NDArray[np.float32], tuple[int, int]]
) -> None:
    array, tile = case
    x = torch.from_numpy(array)
    amax = tile_amax(x, tile)
    np.testing.assert_array_equal(amax.numpy(), reference.tile_amax(array, tile))
    scale = amax_to_scale(amax, fmt)
    codes = quantize(x, scale, fmt, tile)
    grid = scale.double().numpy()
    expected = reference.quantize(array.astype(np.float64), grid, fmt.name, tile)
    np.testing.assert_array_equal(bits(codes), expected)
    values = dequantize(codes, scale, fmt, tile)
    exact = reference.dequantize(expected, grid, fmt.name, tile)
    np.testing.assert_array_equal(values.numpy(), exact.astype(np.float32))
    assert torch.equal(fake_quantize(x, scale, fmt, tile), values)


@EVERY_FORMAT
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (130, 257), (128, 256)], ids=str)
def test_error_is_at_most_half_a_step(
    fmt: Format, tile: tuple[int, int], shape: tuple[int, int]
) -> None:
    x = torch.randn(shape)
    scale = amax_to_scale(tile_amax(x, tile), fmt)
    error = (fake_quantize(x, scale, fmt, tile) - x).abs()
    spread = expand_scale(scale, x.shape, tile)
    relative = 2.0 ** -(fmt.mantissa_bits + 1) * x.abs()
    smallest_step = 2.0 ** (2 - 2 ** (fmt.exponent_bits - 1) - fmt.mantissa_bits)
    bound = torch.maximum(relative, spread * smallest_step / 2)
    # The quotient and the product are rounded to float32 once each.
    assert (error <= bound * (1 + 1e-5) + x.abs() * 2.0**-23).all()


@EVERY_FORMAT
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_quantizing_what_was_dequantized_changes_nothing(
    fmt: Format, tile: tuple[int, int]
) -> None:
    x = torch.randn(9, 13)
    scale = amax_to_scale(tile_amax(x, tile), fmt)
    codes = quantize(x, scale, fmt, tile)
    once = dequantize(codes, scale, fmt, tile)
    np.testing.assert_array_equal(bits(quantize(once, scale, fmt, tile)), bits(codes))


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantize_keeps_the_dtype_and_rounds_once(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.randn(8, 16).to(dtype)
    scale = amax_to_scale(tile_amax(x, (1, 16)), fmt)
    fake = fake_quantize(x, scale, fmt, (1, 16))
    codes = quantize(x, scale, fmt, (1, 16))
    assert fake.dtype == dtype
    assert torch.equal(fake, dequantize(codes, scale, fmt, (1, 16)).to(dtype))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("chunk", [1, 40, 10_000])
def test_fake_quantize_in_pieces_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], chunk: int
) -> None:
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", chunk)
    for shape in [(9, 13), (4, 8), (1, 70), (1000, 3)]:
        x = torch.randn(shape).bfloat16()
        scale = amax_to_scale(tile_amax(x, tile), E4M3)
        codes = quantize(x, scale, E4M3, tile)
        expected = dequantize(codes, scale, E4M3, tile, torch.bfloat16)
        assert torch.equal(fake_quantize(x, scale, E4M3, tile), expected)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_left_as_they_are(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.randn(4, 8).to(dtype) * 1000
    before, scale = x.clone(), torch.ones(1, 1)
    encode(x, fmt)
    quantize(x, scale, fmt, (4, 8))
    fake_quantize(x, scale, fmt, (4, 8))
    tile_amax(x, (1, 8))
    assert torch.equal(x, before)
    assert torch.equal(scale, torch.ones(1, 1))


def test_gaussian_weights_per_channel_lose_what_the_format_must_lose() -> None:
    weight = torch.randn(512, 512) * 0.02
    scale = amax_to_scale(tile_amax(weight, (1, 512)), E4M3)
    error = fake_quantize(weight, scale, E4M3, (1, 512)) - weight
    # 0.0251 is E4M3's error on a Gaussian with an exact scale; rounding the scale up adds little.
    assert error.norm() / weight.norm() < 0.030


@EVERY_FORMAT
@pytest.mark.parametrize("tile", [(1, 32), (4, 8), (2, 32)], ids=str)
def test_zero_tiles_give_positive_zeros_and_leave_their_neighbours_alone(
    fmt: Format, tile: tuple[int, int]
) -> None:
    x = torch.randn(8, 32)
    zeroed = x.clone()
    zeroed[4:] = 0.0
    codes, scales = [], []
    for matrix in (x, zeroed):
        scale = amax_to_scale(tile_amax(matrix, tile), fmt)
        scales.append(scale)
        codes.append(bits(quantize(matrix, scale, fmt, tile)))
    assert (codes[1][4:] == 0).all()
    assert (scales[1].isfinite() & (scales[1] > 0)).all()
    np.testing.assert_array_equal(codes[0][:4], codes[1][:4])


def test_an_empty_matrix_has_one_usable_scale() -> None:
    amax = tile_amax(torch.zeros(0, 8), (1, 8))
    assert (amax_to_scale(amax, E4M3) > 0).all()
    for shape in [(0, 8), (8, 0)]:
        x = torch.zeros(shape)
        scale = amax_to_scale(tile_amax(x, (1, 8)), E4M3)
        assert quantize(x, scale, E4M3, (1, 8)).shape == shape


def test_nan_in_a_tile_shows_in_its_amax_only() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = float("nan")
    amax = tile_amax(x, (1, 4))
    assert amax[0] == 1
    assert amax[1].isnan()


def test_b23_static_scale_too_small_for_the_input_saturates_as_if_the_input_were_clamped() -> None:
    x = torch.tensor([[10.0, -10.0, 1.0, float("nan")]])
    scale = torch.full((1, 1), 0.01)
    fake = fake_quantize(x, scale, E4M3, (1, 4))
    assert torch.allclose(fake[0, :2], torch.tensor([4.48, -4.48]))
    assert fake[0, 3].isnan()
    clamped = x.clamp(-448 * 0.01, 448 * 0.01)
    assert torch.equal(fake[:, :3], fake_quantize(clamped, scale, E4M3, (1, 4))[:, :3])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E3M4], ids=["e4m3", "e5m2", "e3m4"])
def test_tiny_and_huge_tiles_do_not_overflow_or_vanish(fmt: Format) -> None:
    x = torch.tensor([[1e-44, -1e-44], [3e38, -3e38], [1e-30, 1e30]])
    scale = amax_to_scale(tile_amax(x, (1, 2)), fmt)
    values = fake_quantize(x, scale, fmt, (1, 2))
    assert values.isfinite().all()
    assert torch.allclose(values[1], x[1], rtol=0.07)
