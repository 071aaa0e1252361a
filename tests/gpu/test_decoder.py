"""The decoder on the GPU: the CPU's logits, and recorded steps with the bits of plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.ops import CUDA_FEW_ROWS
from quantkit.runtime import scaled_linear
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.layers import DenseLinear, Fp8Linear

DEVICE = torch.device("cuda")
SMALL = replace(
    LLAMA_3_8B, vocab_size=512, hidden_size=256, intermediate_size=512, num_heads=8,
    num_kv_heads=2, head_dim=64, max_context=4096, windows=(None, 64, None),
    rotary=(0, 0, None),
)  # fmt: skip


def on_cpu(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """Return a decoder of the same weights, plain, on the CPU."""

    class Copied(RandomWeights):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"), dtype, quantized=False)
            self.twin = RandomWeights(DEVICE, torch.bfloat16, quantized=True)

        def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return self.twin.tensor(name, shape).cpu().to(dtype)

        def linear(self, modules, rows, columns, bias):  # noqa: ANN001, ANN202
            layer = self.twin.linear(modules, rows, columns, bias)
            if isinstance(layer, DenseLinear):
                return DenseLinear(layer.weight.cpu().to(dtype))
            return Fp8Linear(layer.codes.cpu(), layer.plain.scale.cpu(), columns)

    return random_decoder(SMALL, Copied(), quantized_kv=True)


@torch.inference_mode()
@pytest.mark.parametrize("gate_from", [None, 1], ids=["two kernels", "gate in the product"])
@pytest.mark.parametrize("prompt", [7, 40, 200])
def test_logits_are_those_of_the_cpu(
    prompt: int, gate_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_linear, "FUSED_GATE_FROM", gate_from)
    decoder = random_decoder(SMALL, RandomWeights(DEVICE, torch.bfloat16, True), True)
    exact = on_cpu(decoder, torch.float32)
    ids = torch.randint(512, (prompt + 12,))
    caches = decoder.new_cache(1, prompt), exact.new_cache(1, prompt)
    for at in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, prompt + 12))):
        count = at.stop - at.start
        got, expected = (
            engine.forward(ids[at], [0], [count], cache, last_only=False).cpu()
            for engine, cache in zip((decoder, exact), caches, strict=True)
        )
        # bfloat16 activations through three layers, and 8-bit ones in a long prefill, whose keys
        # and values are what later tokens see.
        relative = (got - expected).norm() / expected.norm()
        assert relative < (0.08 if prompt > CUDA_FEW_ROWS else 0.03), relative


@torch.inference_mode()
@pytest.mark.parametrize("quantized_kv", [False, True])
@pytest.mark.parametrize("widths", [[1], [1, 1, 1], [3, 1, 2], [40]])
def test_recorded_steps_have_the_bits_of_plain_ones(widths: list[int], quantized_kv: bool) -> None:
    decoder = random_decoder(SMALL, RandomWeights(DEVICE, torch.bfloat16, True), quantized_kv)
    sequences = list(range(len(widths)))
    cache, plain = (decoder.new_cache(len(widths), 300) for _ in range(2))
    graphs = decoder._graphs
    assert graphs is not None
    for _ in range(6):
        ids = torch.randint(512, (sum(widths),))
        recorded = decoder.forward(ids, sequences, widths, cache, last_only=False)
        decoder._graphs = None
        expected = decoder.forward(ids, sequences, widths, plain, last_only=False)
        decoder._graphs = graphs
        assert torch.equal(recorded, expected)
    cache.truncate(0, 2)
    plain.truncate(0, 2)
    ids = torch.randint(512, (sum(widths),))
    recorded = decoder.forward(ids, sequences, widths, cache, last_only=False)
    decoder._graphs = None
    assert torch.equal(recorded, decoder.forward(ids, sequences, widths, plain, last_only=False))


@torch.inference_mode()
def test_a_cache_that_grows_is_recorded_again() -> None:
    decoder = random_decoder(SMALL, RandomWeights(DEVICE, torch.bfloat16, True), True)
    cache, plain = decoder.new_cache(1, 20), decoder.new_cache(1, 200)
    for step in range(60):
        ids = torch.tensor([step])
        got = decoder.forward(ids, [0], [1], cache)
        assert torch.equal(got, decoder.forward(ids, [0], [1], plain))
