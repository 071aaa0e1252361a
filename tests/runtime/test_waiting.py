"""Choosing tokens on a GPU asks nothing of it but the answer: no length, no truth, no copy.

Tensors without numbers stand for those of a GPU: whatever would read one raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.runtime import sending
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.sampling import Prefix, choose

GPU = torch.device("meta")
PREFIXES = [Prefix(0, [1, 2], [3, 3]), Prefix(1, [1], []), Prefix(2, [4], [5])]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "all together": {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias": {"logit_bias": {3: 1.0, 7: -1.0}},
    "too short": {"min_new_tokens": 2, "eos_token_ids": frozenset({9})},
}


class NoCopies(TorchDispatchMode):
    """Lets nothing go from one device to another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        given = self.devices((args, kwargs))
        result = func(*args, **(kwargs or {}))
        seen = given | self.devices(result)
        assert len(seen) <= 1, f"{func} has tensors on {seen}"
        return result

    @staticmethod
    def devices(tree: object) -> set[str]:
        leaves = torch.utils._pytree.tree_leaves(tree)
        return {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors have no numbers and stay where they are, but for what is sent without a wait."""
    sent = lambda tensor, device: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)  # noqa: E731
    monkeypatch.setattr(sending, "send", sent)
    with NoCopies():
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("strict")
def test_choosing(case: str) -> None:
    params = ResolvedParams(**{"temperature": 0.7, "seed": 1, **CASES[case]})
    chosen = choose(torch.empty(3, 500, device=GPU), PREFIXES, params)
    assert (chosen.device, chosen.shape, chosen.dtype) == (GPU, (3,), torch.int64)


@pytest.mark.usefixtures("strict")
def test_a_question_and_a_copy_would_be_noticed() -> None:
    x = torch.empty(3, device=GPU)
    with pytest.raises(RuntimeError, match="meta"):
        bool(x.any())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        x.cpu()
    with pytest.raises(AssertionError, match="has tensors on"):
        x[torch.tensor([0, 1])]
