"""The W8A16 kernels of csrc/cuda/weight_linear.cuh on the emulator, against the float64 oracle.

The kernel of a call is chosen by the same code as on a GPU. One pair of format and type sees every
kernel and edge, with sanitizers; the others differ in how codes become operands, and see one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.numerics import E4M3, FORMATS, Format, decode
from tests import reference
from tests.cuda import emulator
from tests.cuda.emulator import Library, Order

SOURCE = r"""
#include "weight_linear_dispatch.h"

using namespace quantkit;
using namespace quantkit::cuda;

// Everything that the product chooses from.
struct Chosen {
  template <class Format, class T, class Launch>
  static void run(const LinearCall& call, bool gated, const Launch& launch) {
    dispatch_weight_linear<Format, T>(call, gated, launch);
  }
};

// What it chooses for more than kNarrow features, here for any number.
struct Wide {
  template <class Format, class T, class Launch>
  static void run(const LinearCall& call, bool, const Launch& launch) {
    launch_by_tokens<Format, T, 8, false, false>(call, launch);
  }
};

// The kernels for up to 8 tokens, without groups.
struct Few {
  template <class Format, class T, class Launch>
  static void run(const LinearCall& call, bool gated, const Launch& launch) {
    using Shape = LinearShape<1, 1, 8, 2, 2, 1>;
    if (!fits_weight_linear(call)) {
      const dim3 grid(static_cast<unsigned>(call.tokens), 2);
      gated ? launch(weight_linear_any<Format, T, true>, grid, kWarp, call)
            : launch(weight_linear_any<Format, T, false>, grid, kWarp, call);
    } else {
      gated ? launch_shape<Format, T, Shape, true, false>(call, launch)
            : launch_shape<Format, T, Shape, false, false>(call, launch);
    }
  }
};

// `shift`: elements by which x begins later.
template <class Kernels, class Format, class T>
void run(const T* x, int64_t shift, const uint8_t* codes, const float* scale, const void* bias,
         int64_t bias_type, T* out, int64_t tokens, int64_t columns, int64_t features,
         int64_t groups, int64_t group_size, int64_t activation, const int32_t* outlier_columns,
         const uint16_t* outlier_weight, int64_t outliers) {
  const bool gated = activation >= 0;
  const LinearCall call{.x = x + shift, .codes = codes, .scale = scale, .bias = bias, .out = out,
                        .tokens = tokens, .columns = columns, .features = features,
                        .groups = groups, .group_size = group_size,
                        .outliers = {outlier_columns, outlier_weight, outliers},
                        .bias_type = static_cast<FloatType>(bias_type),
                        .activation = static_cast<Activation>(gated ? activation : 0)};
  Kernels::template run<Format, T>(
      call, gated, [](auto* kernel, dim3 grid, int threads, const LinearCall& argument) {
        emulator::launch(grid, threads, 0, kernel, argument);
      });
}

#define QK_LINEAR(name, Kernels, Format, T)                                                    \
  extern "C" void name(const T* x, int64_t shift, const uint8_t* codes, const float* scale,    \
                       const void* bias, int64_t bias_type, T* out, int64_t tokens,            \
                       int64_t columns, int64_t features, int64_t groups, int64_t group_size,  \
                       int64_t activation, const int32_t* outlier_columns,                     \
                       const uint16_t* outlier_weight, int64_t outliers) {                         \
    run<Kernels, Format>(x, shift, codes, scale, bias, bias_type, out, tokens, columns,        \
                         features, groups, group_size, activation, outlier_columns,            \
                         outlier_weight, outliers);                                            \
  }
"""
ALL_KERNELS = (
    SOURCE
    + r"""
QK_LINEAR(e4m3_bfloat16, Chosen, E4M3, BFloat16)
QK_LINEAR(e4m3_bfloat16_wide, Wide, E4M3, BFloat16)
"""
)
ALL_TYPES = (
    SOURCE
    + r"""
QK_LINEAR(e4m3_bfloat16, Few, E4M3, BFloat16)
QK_LINEAR(e4m3_float16, Few, E4M3, Half)
QK_LINEAR(e5m2_bfloat16, Few, E5M2, BFloat16)
QK_LINEAR(e5m2_float16, Few, E5M2, Half)
QK_LINEAR(e3m4_bfloat16, Few, E3M4, BFloat16)
QK_LINEAR(e3m4_float16, Few, E3M4, Half)
"""
)

# Both sides of every edge: 16 rows of weights a tile, two tiles a block; 8, 16 and 32 tokens a
# block; 16 columns a lane, 64 a chunk, 128 a unit; 512, 1024 or 2048 the warps together.
FEATURES = [1, 8, 15, 16, 17, 31, 32, 33]
TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33]
COLUMNS = [16, 48, 64, 80, 128, 144, 1024, 1040, 2048, 3136, 4176]
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]  # in the order of enum Activation
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum FloatType
# Half the distance between neighbours, relative to the number: the cost of one rounding.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Layer:
    """Random codes (every finite code occurs) with scales that bring products to about 1."""

    codes: Tensor
    scale: Tensor
    bias: Tensor
    fmt: Format
    group_size: int
    outlier_columns: Tensor | None = None
    outlier_weight: Tensor | None = None

    @classmethod
    def random(cls, rows: int, columns: int, fmt: Format, group_size: int | None = None) -> Layer:
        group_size = columns if group_size is None else group_size
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        codes[~decode(codes.view(fmt.dtype), fmt).isfinite()] = 0x35
        groups = -(-columns // group_size) if columns else 0
        scale = (torch.rand(rows, groups) + 0.5) / fmt.max
        return cls(codes, scale, torch.randn(rows), fmt, group_size)

    def with_outliers(self, count: int) -> Layer:
        """Return the layer with random weights beside the codes of `count` random columns.

        The codes of those columns stay: in a stack of layers, one's outlier is another's code.
        """
        rows, columns = self.codes.shape
        chosen = torch.randperm(columns)[:count].sort().values.int()
        weight = torch.randn(count, rows).bfloat16()
        return replace(self, outlier_columns=chosen, outlier_weight=weight)

    def oracle(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the exact result, and a bound on what float32 sums may add to it.

        A sum of K rounded products in any order is off by at most K u sum|x w| to first order, u
        the unit of float32; 4 more steps are the group's scale, the row's, the bias and slack.
        """
        codes, grid = self.codes.numpy(), self.scale.double().numpy()
        b = None if bias is None else bias.double().numpy()
        y = reference.fp8_linear(x.double().numpy(), codes, grid, self.fmt.name, self.group_size, b)
        absolute = np.abs(reference.float8_values(self.fmt.name))[codes]
        absolute *= reference.expand_grid(grid, codes.shape, (1, self.group_size))
        size = x.double().abs().numpy() @ absolute.T + (0 if b is None else np.abs(b))
        steps = x.shape[1] + 4
        if self.outlier_columns is not None and self.outlier_weight is not None:
            chosen = x[:, self.outlier_columns.long()].double().numpy()
            weight = self.outlier_weight.double().numpy()
            y, size = y + chosen @ weight, size + np.abs(chosen) @ np.abs(weight)
            steps += len(weight) + 1
        bound = steps * UNIT[torch.float32] * size
        return torch.from_numpy(y), torch.from_numpy(bound)

    def gated_oracle(
        self, x: Tensor, bias: Tensor | None, activation: str
    ) -> tuple[Tensor, Tensor]:
        exact, bound = self.oracle(x, bias)
        (gate, up), (d_gate, d_up) = exact.chunk(2, 1), bound.chunk(2, 1)
        # No activation is steeper than 1.13; evaluating it costs a few units of its argument.
        d_act = 1.13 * d_gate + 8 * UNIT[torch.float32] * gate.abs()
        d_product = d_act * (up.abs() + d_up) + (gate.abs() + d_act) * d_up
        return torch.from_numpy(reference.gated(exact.numpy(), activation)), d_product


@dataclass(frozen=True)
class Kernels:
    """The kernels of one format and type of x, on the emulator."""

    library: Library
    fmt: Format
    dtype: torch.dtype
    suffix: str = ""

    def linear(
        self,
        layer: Layer,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        shift: int = 0,
    ) -> Tensor:
        tokens, columns = x.shape
        features = layer.codes.shape[0] // (1 if activation is None else 2)
        out = torch.full((tokens, features), torch.nan, dtype=self.dtype)
        dtype = str(self.dtype).removeprefix("torch.")
        getattr(self.library, f"{self.fmt.name}_{dtype}{self.suffix}")(
            torch.cat([x.new_full((shift,), torch.nan), x.flatten()]) if shift else x,
            shift,
            layer.codes,
            layer.scale,
            bias,
            TYPES[torch.float32 if bias is None else bias.dtype],
            out,
            tokens,
            columns,
            features,
            layer.scale.shape[1],
            layer.group_size,
            -1 if activation is None else ACTIVATIONS.index(activation),
            layer.outlier_columns,
            layer.outlier_weight,
            0 if layer.outlier_columns is None else len(layer.outlier_columns),
        )
        return out

    def random_x(self, tokens: int, columns: int) -> Tensor:
        return torch.randn(tokens, columns).to(self.dtype)


@pytest.fixture(scope="module")
def checked() -> Iterator[Kernels]:
    """Return all kernels of one format and type."""
    library = emulator.compile(ALL_KERNELS)
    yield Kernels(library, E4M3, torch.bfloat16)
    library.close()


@pytest.fixture(scope="module", params=[False, True], ids=["sm89", "sm80"])
def all_types(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = emulator.compile(ALL_TYPES, sanitize=False, sm80=request.param)
    yield library
    library.close()


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def fmt(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def kernels(request: pytest.FixtureRequest, all_types: Library, fmt: Format) -> Kernels:
    """Return a few kernels of each format and type."""
    return Kernels(all_types, fmt, request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_close(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Allow `bound`, and one rounding to the dtype of `actual` (float16 may be subnormal)."""
    rounding = UNIT[actual.dtype] * (exact.abs() + bound) + 2.0**-25 * (actual.dtype == torch.half)
    excess = (actual.double() - exact).abs() - bound - rounding
    assert actual.shape == exact.shape
    assert not excess.numel() or excess.max() <= 0, f"exceeds its bound by {excess.max()}"


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_edge_of_a_block(checked: Kernels, columns: int) -> None:
    for features in FEATURES:
        layer = Layer.random(features, columns, checked.fmt)
        x = checked.random_x(max(TOKENS), columns)
        exact, bound = layer.oracle(x)
        for tokens in TOKENS if features == 17 else (1, 16, 33):
            actual = checked.linear(layer, x[:tokens])
            assert_close(actual, exact[:tokens], bound[:tokens])


@pytest.mark.parametrize("columns", [48, 1040, 2128])
def test_every_edge_of_a_block_of_a_wide_layer(checked: Kernels, columns: int) -> None:
    wide = replace(checked, suffix="_wide")
    for features in (1, 16, 17, 33):
        layer = Layer.random(features, columns, wide.fmt)
        x = wide.random_x(max(TOKENS), columns)
        exact, bound = layer.oracle(x)
        alone = wide.linear(layer, x[:1])
        for tokens in TOKENS:
            actual = wide.linear(layer, x[:tokens])
            assert_close(actual, exact[:tokens], bound[:tokens])
            assert torch.equal(actual[:1], alone)


@pytest.mark.parametrize("columns", [64, 2128])
def test_every_edge_of_a_gated_block(checked: Kernels, columns: int) -> None:
    for features in (1, 16, 17):
        layer = Layer.random(2 * features, columns, checked.fmt)
        x = checked.random_x(max(TOKENS), columns)
        exact, bound = layer.gated_oracle(x, layer.bias, "silu")
        for tokens in TOKENS if features == 17 else (1, 16, 33):
            actual = checked.linear(layer, x[:tokens], layer.bias, "silu")
            assert_close(actual, exact[:tokens], bound[:tokens])


@pytest.mark.parametrize(
    ("columns", "group_size"),
    [(64, 64), (144, 128), (576, 128), (1040, 64), (2128, 128), (2048, 512), (192, 64), (80, 64)],
)
def test_groups_of_columns_have_their_own_scales(
    checked: Kernels, columns: int, group_size: int
) -> None:
    layer = Layer.random(34, columns, checked.fmt, group_size)
    x = checked.random_x(33, columns)
    exact, bound = layer.oracle(x)
    gated_exact, gated_bound = layer.gated_oracle(x, None, "silu")
    for tokens in (1, 8, 9, 17, 33):
        assert_close(checked.linear(layer, x[:tokens]), exact[:tokens], bound[:tokens])
        gated = checked.linear(layer, x[:tokens], None, "silu")
        assert_close(gated, gated_exact[:tokens], gated_bound[:tokens])


@pytest.mark.parametrize(
    ("columns", "group_size", "shift"),
    [
        (1, 1, 0),
        (37, 37, 0),
        (1000, 1000, 0),
        (128, 7, 0),
        (144, 32, 0),
        (576, 192, 0),
        (64, 64, 3),
    ],
)
def test_what_the_fast_kernel_cannot_do(
    checked: Kernels, columns: int, group_size: int, shift: int
) -> None:
    layer = Layer.random(10, columns, checked.fmt, group_size)
    x = checked.random_x(5, columns)
    actual = checked.linear(layer, x, layer.bias, shift=shift)
    assert_close(actual, *layer.oracle(x, layer.bias))
    actual = checked.linear(layer, x, layer.bias, "gelu", shift)
    assert_close(actual, *layer.gated_oracle(x, layer.bias, "gelu"))


@pytest.mark.parametrize("count", [0, 1, 7, 16, 33, 70])
def test_outlier_columns_add_what_the_codes_leave_out(checked: Kernels, count: int) -> None:
    """Fewer, as many, and more outliers than groups of threads that share them."""
    wide = replace(checked, suffix="_wide")
    for features, columns in ((17, 80), (33, 1040)):
        layer = Layer.random(2 * features, columns, checked.fmt).with_outliers(count)
        x = checked.random_x(max(TOKENS), columns)
        exact, bound = layer.oracle(x, layer.bias)
        gated, gated_bound = layer.gated_oracle(x, layer.bias, "silu")
        for tokens in TOKENS if features == 17 else (1, 8, 33):
            for kernels in (checked, wide):
                actual = kernels.linear(layer, x[:tokens], layer.bias)
                assert_close(actual, exact[:tokens], bound[:tokens])
            actual = checked.linear(layer, x[:tokens], layer.bias, "silu")
            assert_close(actual, gated[:tokens], gated_bound[:tokens])


@pytest.mark.parametrize(("columns", "group_size"), [(37, 37), (144, 32), (1040, 64)])
def test_outlier_columns_beside_groups_and_odd_shapes(
    checked: Kernels, columns: int, group_size: int
) -> None:
    layer = Layer.random(34, columns, checked.fmt, group_size).with_outliers(33)
    x = checked.random_x(9, columns)
    assert_close(checked.linear(layer, x, layer.bias), *layer.oracle(x, layer.bias))
    actual = checked.linear(layer, x, None, "gelu")
    assert_close(actual, *layer.gated_oracle(x, None, "gelu"))


def test_no_outliers_change_no_bit(checked: Kernels) -> None:
    layer = Layer.random(34, 1104, checked.fmt)
    x = checked.random_x(9, 1104)
    none = layer.with_outliers(0)
    zero = replace(layer.with_outliers(5), outlier_weight=torch.zeros(5, 34).bfloat16())
    for activation in (None, "silu"):
        expected = checked.linear(layer, x, layer.bias, activation)
        for other in (none, zero):
            assert torch.equal(checked.linear(other, x, layer.bias, activation), expected)


def test_every_format_and_type(kernels: Kernels) -> None:
    for columns in (1104, 37):
        layer = Layer.random(38, columns, kernels.fmt).with_outliers(5)
        x = kernels.random_x(11, columns)
        for activation in ACTIVATIONS:
            actual = kernels.linear(layer, x, layer.bias, activation)
            assert_close(actual, *layer.gated_oracle(x, layer.bias, activation))
        for dtype in TYPES:
            bias = layer.bias.to(dtype)
            assert_close(kernels.linear(layer, x, bias), *layer.oracle(x, bias))


@pytest.mark.parametrize("columns", [16, 80, 5])
def test_every_code_has_its_value_in_every_column(kernels: Kernels, columns: int) -> None:
    values = torch.from_numpy(reference.float8_values(kernels.fmt.name))
    finite = values.isfinite().nonzero().flatten()
    codes = torch.zeros(256, columns, dtype=torch.uint8)
    for code in finite.tolist():
        codes[code, code % columns] = code
    layer = Layer(codes, torch.ones(256, 1), torch.zeros(256), kernels.fmt, columns)
    actual = kernels.linear(layer, torch.ones(9, columns, dtype=kernels.dtype))
    for row in actual:
        assert torch.equal(row[finite], values[finite].to(kernels.dtype))


@pytest.mark.parametrize(("columns", "group_size"), [(1104, 1104), (1104, 128), (37, 37)])
def test_a_row_is_the_same_bits_in_every_batch(
    checked: Kernels, columns: int, group_size: int
) -> None:
    layer = Layer.random(22, columns, checked.fmt, group_size)
    x = checked.random_x(34, columns)
    for activation in (None, "gelu_tanh"):
        alone = torch.cat([checked.linear(layer, row, None, activation) for row in x.split(1)])
        for tokens in (2, 7, 8, 9, 15, 16, 17, 24, 32, 33, 34):
            batch = checked.linear(layer, x[-tokens:], None, activation)
            assert torch.equal(batch, alone[-tokens:])


def test_columns_of_inactive_lanes_and_rows_are_not_touched(checked: Kernels) -> None:
    """Infinities in one token stay there, though its columns share an instruction with others'."""
    layer = Layer.random(20, 80, checked.fmt)
    x = checked.random_x(9, 80)
    x[4] = torch.inf
    actual = checked.linear(layer, x)
    assert actual[4].isfinite().sum() == 0
    x[4] = 0
    others = torch.arange(9) != 4
    assert torch.equal(actual[others], checked.linear(layer, x)[others])


def test_the_order_of_threads_does_not_matter(checked: Kernels, order: Order) -> None:
    layers = [Layer.random(70, 1104, checked.fmt, size).with_outliers(9) for size in (1104, 128)]
    xs = [checked.random_x(tokens, 1104) for tokens in (1, 9, 33)]
    cases = [(layer, x, act) for layer in layers for x in xs for act in (None, "silu")]
    expected = [checked.linear(layer, x, layer.bias, act) for layer, x, act in cases]
    checked.library.order = order
    try:
        actual = [checked.linear(layer, x, layer.bias, act) for layer, x, act in cases]
    finally:
        checked.library.order = Order.ASCENDING
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_nothing_to_sum_or_to_return(checked: Kernels, activation: str | None) -> None:
    empty = Layer.random(6, 0, checked.fmt, 1)
    actual = checked.linear(empty, checked.random_x(2, 0), torch.ones(6), activation)
    assert torch.equal(actual.float(), torch.ones_like(actual.float()))
    layer = Layer.random(6, 64, checked.fmt)
    assert checked.linear(layer, checked.random_x(0, 64), None, activation).numel() == 0
    none = Layer.random(0, 64, checked.fmt)
    assert checked.linear(none, checked.random_x(3, 64), None, activation).numel() == 0
