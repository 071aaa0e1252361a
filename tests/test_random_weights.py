"""The decoder with random weights that speed is measured with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.runtime.layers import DenseLinear, Fp8Linear

CPU = torch.device("cpu")
SMALL = replace(
    LLAMA_3_8B, vocab_size=96, hidden_size=64, intermediate_size=80, num_heads=4, num_kv_heads=2,
    head_dim=16, max_context=256, windows=(None,) * 2, rotary=(0,) * 2,
)  # fmt: skip


@pytest.mark.parametrize(("quantized", "kind"), [(True, Fp8Linear), (False, DenseLinear)])
def test_layers_are_of_the_kind_asked_for(quantized: bool, kind: type) -> None:
    weights = RandomWeights(CPU, torch.float32, quantized)
    assert isinstance(weights.linear(["a", "b"], [8, 8], 16, bias=True), kind)
    assert isinstance(weights.head("lm_head", torch.zeros(8, 16), tied=False), DenseLinear)


@pytest.mark.parametrize("quantized", [False, True])
def test_it_runs_the_same_every_time_with_activations_of_ordinary_size(quantized: bool) -> None:
    rows = []
    for _ in range(2):
        decoder = random_decoder(SMALL, RandomWeights(CPU, torch.bfloat16, quantized), quantized)
        cache = decoder.new_cache(1, 40)
        rows.append(decoder.forward(torch.arange(40), [0], [40], cache))
    assert torch.equal(*rows)
    assert 0.1 < float(rows[0].std()) < 10
