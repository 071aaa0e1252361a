"""A draw from some of the tokens is that from all, of which the others are impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.runtime.request import Request
from quantkit.speculative.drawing import Draw, draw_coupled, draw_independent
from quantkit.speculative.vocabulary import DraftVocabulary
from tests.speculative import toy

VOCAB = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "penalty, greedy": {"temperature": 0, "repetition_penalty": 1.5},
    "penalty": {"temperature": 0.9, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.9, "logit_bias": {0: 5.0, 2: 3.0}},  # on a token of either kind
}


@pytest.mark.parametrize("kind", [draw_coupled, draw_independent])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_columns_of_a_vocabulary_mean_their_tokens(settings: dict[str, Any], kind: Any) -> None:
    params = toy.params(**settings)
    draw: Draw = kind(params)
    vocabulary = DraftVocabulary(torch.arange(1, VOCAB, 2), VOCAB)
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        narrow = torch.randn(2, len(vocabulary.token_ids), generator=generator) * 2
        requests = [Request(number + row, [1, 3], 10**6, params, None, [3]) for row in range(2)]
        drafted: list[list[int]] = [[], [1]]
        some = draw(narrow, requests, drafted, vocabulary)
        every = draw(vocabulary.widen(narrow), requests, drafted)
        assert some.tokens == every.tokens
        assert some.confidences == pytest.approx(every.confidences, rel=1e-5)
        if some.laws is not None and every.laws is not None:
            assert torch.equal(some.laws, every.laws)
        assert (some.laws is None) == (every.laws is None)
