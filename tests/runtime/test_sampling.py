from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import GenerationError
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.sampling import Prefix, keep_likely, log_probabilities, process, sample

VOCAB = 50


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 0, **values})


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def prefixes(rows: int, seed: int = 0) -> list[Prefix]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 12), generator=generator).tolist()
    return [Prefix(i, row[: 4 + i % 3], row[4 + i % 3 :]) for i, row in enumerate(ids)]


def support(scores: Tensor) -> Tensor:
    return scores.isfinite()


@pytest.mark.parametrize("penalty", [0.5, 1.8])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, before = random_logits(6), prefixes(6)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[*p.prompt, *p.generated] for p in before]), logits.clone()
    )
    assert torch.equal(process(logits, before, params(repetition_penalty=penalty)), expected)


@pytest.mark.parametrize("length", [0, 3, 8, 20])
def test_min_new_tokens_matches_transformers(length: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    logits = random_logits(1)
    before = Prefix(0, [5, 6], [7] * 8)
    processor = MinNewTokensLengthLogitsProcessor(2, length, [3, 9], device="cpu")
    expected = processor(torch.tensor([[*before.prompt, *before.generated]]), logits.clone())
    resolved = params(min_new_tokens=length, eos_token_ids=frozenset([3]), stop_token_ids={9})
    assert torch.equal(process(logits, [before], resolved), expected)


def test_logit_bias_matches_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    logits, before = random_logits(4), prefixes(4)
    bias = {3: 2.5, 9: -math.inf}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(torch.zeros(4, 3, dtype=torch.int64), logits.clone())
    assert torch.equal(process(logits, before, params(logit_bias=bias)), expected)


def test_frequency_and_presence_count_new_tokens_only() -> None:
    logits = torch.zeros(1, VOCAB)
    before = Prefix(0, prompt=[1, 1, 2], generated=[3, 3, 4])
    scores = process(logits, [before], params(frequency_penalty=0.5, presence_penalty=0.25))[0]
    assert scores[3] == -1.25
    assert scores[4] == -0.75
    assert scores.count_nonzero() == 2
    assert logits.count_nonzero() == 0  # the caller's tensor is not changed


@pytest.mark.parametrize("top_k", [1, 5, 49, 50, 1000])
def test_top_k_matches_transformers(top_k: int) -> None:
    from transformers import TopKLogitsWarper

    logits = random_logits(8)
    expected = TopKLogitsWarper(top_k)(None, logits)
    assert torch.equal(keep_likely(logits, params(top_k=top_k)), expected)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [50, 300, 20_000])  # each of the bound's three searches
def test_top_p_matches_transformers(top_p: float, vocab: int) -> None:
    from transformers import TopPLogitsWarper

    logits = random_logits(4, vocab) / 3
    expected = TopPLogitsWarper(top_p)(None, logits)
    ours = keep_likely(logits, params(top_p=top_p))
    # transformers sums float32 from the unlikely end; over 20 000 terms the edge may move by one.
    moved = (support(ours) != support(expected)).sum(-1)
    assert bool((moved <= (0 if vocab <= 300 else 1)).all())


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_matches_transformers(min_p: float) -> None:
    from transformers import MinPLogitsWarper

    logits = random_logits(8)
    expected = MinPLogitsWarper(min_p)(None, logits.clone())
    assert torch.equal(keep_likely(logits, params(min_p=min_p)), expected)


def test_tokens_that_tie_with_a_kept_one_are_kept() -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0, 1.0, -5.0]])
    assert support(keep_likely(logits, params(top_k=3)))[0].tolist() == [True] * 4 + [False]
    assert support(keep_likely(logits, params(top_p=0.4)))[0].tolist() == [True] * 2 + [False] * 3


def test_greedy_is_the_argmax_and_the_first_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, prefixes(2), params()).tolist() == [1, 0]


def test_a_vanishing_temperature_is_greedy() -> None:
    logits, before = random_logits(64), prefixes(64)
    chosen = sample(logits, before, params(temperature=1e-300))
    assert torch.equal(chosen, logits.argmax(-1))


def test_rows_do_not_depend_on_the_batch() -> None:
    logits, before = random_logits(16), prefixes(16)
    resolved = params(
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        min_new_tokens=7,
        eos_token_ids=frozenset([1, 2]),
    )
    together = sample(logits, before, resolved).tolist()
    alone = [int(sample(logits[i : i + 1], [before[i]], resolved)) for i in range(16)]
    backwards = sample(logits.flip(0), before[::-1], resolved).flip(0).tolist()
    assert together == alone == backwards


def test_same_seed_same_tokens_and_equal_rows_of_one_batch_differ() -> None:
    logits = torch.zeros(200, VOCAB)
    same = [Prefix(0, [1], [])] * 200
    assert len(set(sample(logits, same, params(temperature=1.0)).tolist())) == 1
    by_sequence = [Prefix(i, [1], []) for i in range(200)]
    first = sample(logits, by_sequence, params(temperature=1.0, seed=1))
    assert torch.equal(first, sample(logits, by_sequence, params(temperature=1.0, seed=1)))
    assert len(set(first.tolist())) > VOCAB // 2
    assert not torch.equal(first, sample(logits, by_sequence, params(temperature=1.0, seed=2)))


SETTINGS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "all": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
}


def exact_distribution(logits: Tensor, setting: dict[str, Any]) -> Tensor:
    """The target by its definition, in plain Python: temperature, then top-k, then top-p."""
    weights = [math.exp(x / setting["temperature"]) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: setting.get("top_k") or None]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if mass / total < setting.get("top_p", 1.0):
            nucleus.append(i)
        mass += weights[i]
    result = torch.zeros(len(weights), dtype=torch.float64)
    for i in nucleus:
        result[i] = weights[i]
    return result / result.sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_sampled_distribution_is_the_exact_one(name: str) -> None:
    # A Markov chain of three tokens over a vocabulary of 8: 20 000 sequences, so the noise of the
    # total variation distance is about sqrt(8 / 20 000) / 2.5 = 0.008, of a pair 0.023.
    setting, count = SETTINGS[name], 20_000
    start, table = random_logits(1, 8, seed=3)[0] / 2, random_logits(8, 8, seed=4) / 2
    resolved = params(seed=11, **setting)
    generated = torch.empty(count, 0, dtype=torch.int64)
    for position in range(3):
        logits = start.expand(count, 8) if position == 0 else table[generated[:, -1]]
        before = [Prefix(i, [0], row) for i, row in enumerate(generated.tolist())]
        chosen = sample(logits, before, resolved)
        generated = torch.cat([generated, chosen[:, None]], dim=1)
    target = exact_distribution(start, setting)
    moves = torch.stack([exact_distribution(row, setting) for row in table])
    pairs = target[:, None] * moves
    for position in range(3):
        seen = torch.bincount(generated[:, position], minlength=8) / count
        assert float((seen - target).abs().sum()) / 2 < 0.02
        target = target @ moves
    seen = torch.bincount(generated[:, 0] * 8 + generated[:, 1], minlength=64) / count
    assert float((seen - pairs.flatten()).abs().sum()) / 2 < 0.04


def test_log_probabilities_are_of_the_raw_logits() -> None:
    logits = random_logits(2)
    expected = logits.log_softmax(-1)
    first, second = log_probabilities(logits, [7, 8], 3)
    assert next(iter(first)) == 7
    assert first[7] == pytest.approx(float(expected[0, 7]))
    assert set(second) == {8, *expected[1].topk(3).indices.tolist()}
    assert log_probabilities(logits, [7, 8], 0)[0].keys() == {7}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(temperature: float, value: float) -> None:
    logits = random_logits(3)
    logits[1, 4] = value
    with pytest.raises(GenerationError, match="not finite at sequence 1, position 12"):
        sample(logits, prefixes(3), params(temperature=temperature))


def test_forbidding_every_token_is_an_error() -> None:
    bias = dict.fromkeys(range(VOCAB), -math.inf)
    with pytest.raises(GenerationError, match="no token is allowed"):
        sample(random_logits(1), prefixes(1), params(logit_bias=bias, temperature=1.0))
