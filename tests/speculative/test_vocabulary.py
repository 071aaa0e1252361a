"""Tokenizers of target and draft: B37."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.speculative.vocabulary import check_same_tokens, fit_logits

WORDS = {number: f"w{number}" for number in range(10)}


@pytest.mark.parametrize("size", [4, 10, 14])
def test_b37_padded_and_cut_vocabularies_are_compatible(size: int) -> None:
    check_same_tokens(WORDS, {n: f"w{n}" for n in range(size)}, "big", "small")


def test_b37_the_first_difference_is_named() -> None:
    permuted = {**WORDS, 7: "w8", 8: "w7"}
    with pytest.raises(
        UnsupportedError, match=r"small cannot draft for big.*token 7 is 'w8' there"
    ):
        check_same_tokens(WORDS, permuted, "big", "small")


def test_b37_nothing_in_common_is_a_difference_too() -> None:
    with pytest.raises(UnsupportedError, match="no token id in common"):
        check_same_tokens(WORDS, {}, "big", "small")


def test_b37_ids_that_the_draft_lacks_have_probability_0() -> None:
    logits = torch.randn(2, 5)
    assert torch.equal(fit_logits(logits, 3), logits[:, :3])
    padded = fit_logits(logits, 7)
    assert torch.equal(padded[:, :5], logits)
    assert padded[:, 5:].tolist() == [[-math.inf] * 2] * 2
