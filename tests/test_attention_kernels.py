"""Attention ops at the edges of the C++ kernels, and what these promise beyond their numbers.

Keys are taken in partitions of 64 and decoded 32 at a time; columns 64, 32 or 8 at a time; queries
in tiles of 32 rows and groups of 4. With a matrix unit, queries in bfloat16 go in tiles of up to 64
rows, which are 16 rows at a time, and keys 16 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.attention_ops import kv_append, paged_attention, rms_norm, rotary
from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.numerics import E3M4, E4M3, Format, encode
from quantkit.row_ops import add_rms_norm
from tests import reference

REJECTED = (UnsupportedError, RuntimeError)
ONLY_COMPILED = pytest.mark.skipif(not EXTENSION_LOADED, reason="torch does not promise it")
# Half the distance between neighbours, relative to the number: the cost of one rounding.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CODES = {fmt.dtype: fmt for fmt in (E4M3, E3M4)}
WIDE_AND_NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", UNIT, ids=lambda d: str(d).removeprefix("torch."))


@dataclass(frozen=True)
class Batch:
    """Sequences in one cache, with as many queries each as `new` says."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    tables: Tensor
    lengths: list[int]
    new: list[int]
    query: Tensor
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def random(
        cls, lengths: list[int], new: list[int], heads: int, kv_heads: int, head_dim: int,
        cache: torch.dtype = torch.float8_e4m3fn, block: int = 16, scales: int = 1,
    ) -> Batch:  # fmt: skip
        width = -(-max(lengths) // block)
        tables = torch.randperm(len(lengths) * width).int().view(len(lengths), width)
        shape = (len(lengths) * width, block, kv_heads, head_dim)
        k, v = (torch.randn(shape) for _ in range(2))
        k_scale = v_scale = None
        if cache in CODES:
            k_scale, v_scale = torch.rand(scales) * 0.02 + 0.01, torch.rand(scales) * 0.02 + 0.01
            k, v = (encode(x / 0.02 * CODES[cache].max / 448, CODES[cache]) for x in (k, v))
            k_scale, v_scale = (x * 448 / CODES[cache].max for x in (k_scale, v_scale))
        query = torch.randn(sum(new), heads, head_dim)
        return cls(k.to(cache), v.to(cache), k_scale, v_scale, tables, lengths, new, query)

    def run(self) -> Tensor:
        starts = torch.tensor([0, *np.cumsum(self.new)], dtype=torch.int32)
        return paged_attention(
            self.query, self.k, self.v, self.k_scale, self.v_scale, self.tables,
            torch.tensor(self.lengths, dtype=torch.int32), starts, 0.125, self.window,
            self.softcap,
        )  # fmt: skip

    def only(self, sequence: int, first: int, count: int) -> Batch:
        """Some adjacent queries of one sequence, the cache ending where the last of them stands."""
        length = self.lengths[sequence] - self.new[sequence] + first + count
        row = sum(self.new[:sequence]) + first
        return replace(
            self,
            tables=self.tables[sequence : sequence + 1],
            lengths=[length],
            new=[count],
            query=self.query[row : row + count],
        )

    def oracle(self) -> Tensor:
        k, v = self._values(self.k, self.k_scale), self._values(self.v, self.v_scale)
        parts = [
            reference.attention(
                rows.double().numpy(),
                reference.paged(k, table.tolist(), length),
                reference.paged(v, table.tolist(), length),
                0.125,
                self.window,
                self.softcap,
            )
            for rows, table, length in zip(
                self.query.split(self.new), self.tables, self.lengths, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(parts))

    def _values(self, cache: Tensor, scale: Tensor | None) -> reference.Float64:
        if scale is None:
            return cache.double().numpy()
        codes = cache.view(torch.uint8).numpy()
        return reference.float8_values(CODES[cache.dtype].name)[
            codes
        ] * scale.double().numpy().reshape(-1, 1)


def assert_near(actual: Tensor, exact: Tensor, slack: float = 2e-5) -> None:
    """Allow float32 sums of numbers about 1, and one rounding to the dtype."""
    error = (actual.double() - exact).abs() - UNIT[actual.dtype] * exact.abs()
    assert actual.shape == exact.shape
    assert error.max() <= slack, f"off by {error.max()}"


LENGTHS = [1, 31, 32, 33, 63, 64, 65, 257, 520]


@WIDE_AND_NARROW
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (4, 4, 128), (5, 1, 80), (8, 2, 32), (7, 1, 10), (2, 1, 72), (17, 1, 64)],
)
def test_attention_matches_the_oracle(
    heads: int, kv_heads: int, head_dim: int, length: int, dtype: torch.dtype
) -> None:
    for new in (1, 3, 40):
        batch = Batch.random([length], [min(length, new)], heads, kv_heads, head_dim)
        batch = replace(batch, query=batch.query.to(dtype))
        assert_near(batch.run(), batch.oracle())


@WIDE_AND_NARROW
@pytest.mark.parametrize("window", [1, 7, 32, 256, 300])
@pytest.mark.parametrize("new", [1, 5, 80])
def test_windows_match_the_oracle(new: int, window: int, dtype: torch.dtype) -> None:
    batch = Batch.random([519, 300], [new, new], 6, 2, 64, scales=2)
    batch = replace(batch, window=window, query=batch.query.to(dtype))
    assert_near(batch.run(), batch.oracle())


@WIDE_AND_NARROW
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_whole_prompt_matches_the_oracle(cache: torch.dtype, dtype: torch.dtype) -> None:
    batch = Batch.random([300], [300], 9, 3, 64, cache)
    batch = replace(batch, query=batch.query.to(dtype))
    assert_near(batch.run(), batch.oracle())


@WIDE_AND_NARROW
@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 1, 80), (7, 1, 10)])
def test_e3m4_codes_match_the_oracle(
    heads: int, kv_heads: int, head_dim: int, new: int, dtype: torch.dtype
) -> None:
    for length in (65, 257):
        batch = Batch.random(
            [length], [new], heads, kv_heads, head_dim, torch.uint8, scales=kv_heads
        )
        batch = replace(batch, query=batch.query.to(dtype))
        assert_near(batch.run(), batch.oracle())


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("new", [1, 70])
@pytest.mark.parametrize("cache", [*CODES, torch.bfloat16], ids=str)
def test_capped_scores_match_the_oracle(
    cache: torch.dtype, new: int, window: int | None, dtype: torch.dtype
) -> None:
    batch = Batch.random([300, 90], [new, new], 6, 2, 64, cache)
    # Scores of several times the cap, so that it matters, and far below it.
    query = (batch.query * torch.tensor([0.01, 1.0, 4.0, 0.1, 2.0, 30.0]).view(-1, 1)).to(dtype)
    batch = replace(batch, query=query, window=window, softcap=3.0)
    assert_near(batch.run(), batch.oracle())
    assert not torch.allclose(batch.run(), replace(batch, softcap=None).run())


def test_a_cap_that_is_not_above_zero_is_refused() -> None:
    for softcap in (0.0, -1.0, torch.nan):
        with pytest.raises(REJECTED, match="paged_attention: softcap must be above 0, got"):
            replace(Batch.random([20], [3], 3, 1, 8), softcap=softcap).run()


@EVERY_DTYPE
@pytest.mark.parametrize("cache", UNIT)
def test_caches_and_queries_of_every_float(dtype: torch.dtype, cache: torch.dtype) -> None:
    batch = Batch.random([37, 290], [2, 3], 6, 2, 24, cache, block=5)
    batch = replace(batch, query=batch.query.to(dtype))
    out = batch.run()
    assert out.dtype == dtype
    assert_near(out, batch.oracle())


@WIDE_AND_NARROW
def test_scores_far_apart_stay_finite(dtype: torch.dtype) -> None:
    batch = Batch.random([300], [4], 3, 1, 64)
    batch = replace(batch, query=(batch.query * 1000).to(dtype))
    assert_near(batch.run(), batch.oracle(), slack=2e-2)


@ONLY_COMPILED
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
@EVERY_DTYPE
def test_a_query_is_the_same_bits_in_every_batch(
    dtype: torch.dtype, cache: torch.dtype, window: int | None
) -> None:
    batch = Batch.random([700, 20, 300], [9, 20, 40], 6, 2, 64, cache, scales=2)
    batch = replace(batch, query=batch.query.to(dtype), window=window)
    together = batch.run().split(batch.new)
    for sequence, rows in enumerate(together):
        for first, count in ((0, 1), (3, 1), (2, 4), (len(rows) - 1, 1), (0, len(rows))):
            alone = batch.only(sequence, first, count).run()
            assert torch.equal(alone, rows[first : first + count])


@ONLY_COMPILED
def test_threads_do_not_change_a_bit() -> None:
    long, wide = Batch.random([3000], [1], 3, 1, 64), Batch.random([200] * 9, [9] * 9, 4, 4, 64)
    narrow = [replace(batch, query=batch.query.bfloat16()) for batch in (long, wide)]
    x, weight, angles = torch.randn(300, 577), torch.randn(577), torch.randn(300, 64)
    heads = torch.randn(300, 4, 64)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows = rms_norm(x, weight, 1e-5), rotary(heads, angles, angles)
            results.append((*(batch.run() for batch in (long, wide, *narrow)), *rows))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@ONLY_COMPILED
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODES], ids=str)
def test_a_nan_stays_with_the_queries_that_see_it(dtype: torch.dtype, window: int | None) -> None:
    batch = Batch.random([300], [300], 3, 1, 64, dtype)
    x_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    batch = replace(batch, query=batch.query.to(x_dtype), window=window)
    clean = batch.run()
    block, offset = int(batch.tables[0, 150 // 16]), 150 % 16
    nan = torch.full((64,), torch.nan)
    batch.v[block, offset] = encode(nan, CODES[dtype]) if dtype in CODES else nan.to(dtype)
    out = batch.run()
    last = 300 if window is None else 150 + window
    assert out[150:last].isnan().all()
    assert torch.equal(out[:150], clean[:150])
    assert torch.equal(out[last:], clean[last:])


@WIDE_AND_NARROW
def test_memory_that_was_never_written_is_not_read(dtype: torch.dtype) -> None:
    batch = Batch.random([37], [3], 3, 1, 64)
    batch = replace(batch, query=batch.query.to(dtype))
    clean = batch.run()
    for cache in (batch.k, batch.v):
        cache.view(torch.uint8)[int(batch.tables[0, 2]), 37 % 16 :] = 0x7F  # NaN
    assert torch.equal(batch.run(), clean)


@EVERY_DTYPE
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fmt", CODES.values(), ids=lambda f: f.name)
def test_append_encodes_every_kind_of_number(fmt: Format, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**32, (rows, 3, 24), generator=generator) - 2**31
    key = bits.int().view(torch.float32).clamp(-1e4, 1e4).to(dtype)  # all exponents, NaN too
    steps = torch.arange(rows * 3 * 24).view(rows, 3, 24)
    value = ((steps % 2048) * 2.0**-11 - 0.3).to(dtype)  # ties between codes
    caches = torch.zeros(2, rows, 1, 3, 24, dtype=torch.uint8).view(fmt.dtype)
    scale = torch.tensor([1.0, 0.75, 2.0**-9])
    slots = torch.arange(rows).flip(0)
    kv_append(key, value, caches[0], caches[1], scale, scale, slots)
    for x, cache in ((key, caches[0]), (value, caches[1])):
        quotient = (x.float() / scale.view(-1, 1)).double().numpy()
        expected = reference.float8_encode(quotient, fmt.name)
        stored = cache.view(torch.uint8)[slots, 0].numpy()
        nan = np.isnan(quotient)
        np.testing.assert_array_equal(stored[~nan], expected[~nan])
        assert np.isnan(reference.float8_values(fmt.name)[stored[nan]]).all()


@EVERY_DTYPE
@pytest.mark.parametrize("cache", UNIT)
def test_append_rounds_once_to_the_dtype_of_the_cache(
    dtype: torch.dtype, cache: torch.dtype
) -> None:
    x = torch.randn(3, 2, 20).to(dtype)
    stored = torch.zeros(4, 2, 2, 20, dtype=cache)
    kv_append(x, x, stored, stored.clone(), None, None, torch.tensor([5, 0, 3]))
    assert torch.equal(stored.flatten(0, 1)[[5, 0, 3]], x.to(cache))


@EVERY_DTYPE
@pytest.mark.parametrize("features", [1, 7, 8, 16, 17, 576])
def test_rms_norm_of_every_dtype(features: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, features).to(dtype), torch.rand(features).to(dtype) + 0.5
    x[3] *= 1e-3
    exact = torch.from_numpy(reference.rms_norm(x.double().numpy(), weight.double().numpy(), 1e-6))
    error = (rms_norm(x, weight, 1e-6).double() - exact).abs()
    assert (error <= (2.5 * UNIT[dtype] + 4e-6) * exact.abs()).all()


@EVERY_DTYPE
@pytest.mark.parametrize(("rows", "features"), [(0, 8), (1, 1), (3, 17), (70, 33), (100, 576)])
def test_add_rms_norm_is_the_norm_of_the_sum(rows: int, features: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, rows, features).to(dtype)
    weight = torch.rand(features).to(dtype) + 0.5
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, rms_norm(x + delta, weight, 1e-5))


@EVERY_DTYPE
@pytest.mark.parametrize("head_dim", [2, 10, 64, 66])
def test_rotary_rounds_every_step(head_dim: int, dtype: torch.dtype) -> None:
    wide, angles = torch.randn(5, 7, head_dim).to(dtype), torch.randn(2, 5, head_dim).to(dtype)
    x, cos, sin = wide[:, 1:4], angles[0], angles[1]
    rotated = torch.cat((-x[..., head_dim // 2 :], x[..., : head_dim // 2]), dim=-1)
    expected = x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    assert torch.equal(rotary(x, cos, sin), expected)


@ONLY_COMPILED
@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    cache, x = torch.zeros(2, 16, 1, 8), torch.zeros(1, 1, 8)
    with pytest.raises(REJECTED, match=f"kv_append: slots must be below 32, got {slot}"):
        kv_append(x, x, cache, cache.clone(), None, None, torch.tensor([slot]))


@ONLY_COMPILED
@pytest.mark.parametrize(
    "bad",
    [
        {"tables": torch.tensor([[0, 99]], dtype=torch.int32)},
        {"tables": torch.tensor([[0]], dtype=torch.int32)},
        {"lengths": [2]},
        {"new": [2]},
    ],
    ids=str,
)
def test_indices_outside_the_cache_are_refused(bad: dict[str, object]) -> None:
    batch = Batch.random([20], [3], 3, 1, 8)
    with pytest.raises(REJECTED, match="within the cache and the query"):
        replace(batch, **bad).run()


@ONLY_COMPILED
def test_arguments_are_named() -> None:
    x, weight, cache = torch.randn(3, 8), torch.randn(8), torch.zeros(2, 16, 1, 8)
    with pytest.raises(REJECTED, match="rms_norm: weight must be of x's dtype, float32, got bfl"):
        rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(REJECTED, match="rotary: x must be contiguous but for its first dimension"):
        rotary(torch.randn(3, 8, 2).transpose(1, 2), x, x)
    with pytest.raises(REJECTED, match="kv_append: key must be of shape"):
        kv_append(x, x, cache, cache, None, None, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(REJECTED, match=r"add_rms_norm: delta must be .* = \[3, 8\], got \[2, 8\]"):
        add_rms_norm(x, x[:2], weight, 1e-5)
    with pytest.raises(
        REJECTED, match="add_rms_norm: delta must be of x's dtype, float32, got bfl"
    ):
        add_rms_norm(x, x.bfloat16(), weight, 1e-5)
