"""Drafters, controller and loop together: nothing that they do can be seen in the output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quantkit.errors import UnsupportedError
from quantkit.runtime.generation import Generation
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Completion
from quantkit.runtime.stats import Stats
from quantkit.speculative.controller import PROBE_INTERVAL, Controller
from quantkit.speculative.drafter import Drafter
from quantkit.speculative.hybrid import HybridDrafter
from quantkit.speculative.model_drafter import ModelDrafter
from quantkit.speculative.speculation import MOST_DRAFTED, Speculator
from quantkit.speculative.step_costs import StepCosts
from quantkit.speculative.suffix import SuffixDrafter
from tests.runtime.fake_engine import FakeEngine
from tests.speculative.scripted import result, run
from tests.speculative.test_loop import PROMPTS, SETTINGS


def free(batch: int, rows: int) -> float:
    """Rows cost nothing beside the step: any draft pays."""
    return 1e-3


def dear(batch: int, rows: int) -> float:
    """A row costs what a step does: no draft pays."""
    return 1e-3 * rows


def other_model() -> FakeEngine:
    """A model that agrees with the target now and then: it looks at the last token alone."""
    target = FakeEngine()
    return FakeEngine(
        row=lambda prefix: target._row(prefix) if prefix[-1] % 2 else target._row([1])
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "suffix": lambda: SuffixDrafter([PROMPTS[2], PROMPTS[1] * 3]),
    "model": lambda: ModelDrafter(other_model()),
    "same-model": lambda: ModelDrafter(FakeEngine()),
    "smaller-vocabulary": lambda: ModelDrafter(FakeEngine(24)),
    "larger-vocabulary": lambda: ModelDrafter(FakeEngine(40)),
    "hybrid": lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(other_model()), "model"),
}


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 3, "max_new_tokens": 30, "logprobs": 1, **values})


def speculate(
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    resolved: ResolvedParams,
) -> tuple[list[Completion], Stats]:
    speculation = speculator.start(resolved, len(prompts))
    generation = Generation(
        speculator.target, prompts, resolved, None, speculation, speculator.width
    )
    return generation.completions(), generation.stats


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_b38_b42_drafters_change_nothing(setting: str, drafter: str) -> None:
    resolved = params(**SETTINGS[setting])
    speculator = Speculator(FakeEngine(), DRAFTERS[drafter](), costs=StepCosts(free))
    for prompts in ([PROMPTS[1]], PROMPTS, PROMPTS[::-1]):
        plain = run(FakeEngine(), prompts, resolved)
        for _ in range(2):  # the second time there is something to remember
            ours, _ = speculate(speculator, prompts, resolved)
            assert result(ours) == result(plain)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_rejection_keeps_to_limits_and_repeats_at_a_fixed_width(
    verification: str, drafter: str
) -> None:
    resolved = params(temperature=0.8, eos_token_ids=frozenset([3, 8]), top_k=10)

    def generate() -> list[Completion]:
        engine = FakeEngine(max_context=30)
        speculator = Speculator(engine, DRAFTERS[drafter](), verification, width=6)
        return speculate(speculator, PROMPTS, resolved)[0]

    ours = generate()
    assert result(ours) == result(generate())
    for prompt, done in zip(PROMPTS, ours, strict=True):
        assert len(done.ids) <= 30 - len(prompt)
        assert not {3, 8} & set(done.ids[:-1])
        assert [next(iter(row)) for row in done.logprobs or []] == done.ids


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_b38_penalties_apply_under_rejection_too(verification: str) -> None:
    # Almost greedy: the likeliest token after penalties has all of the mass.
    resolved = params(temperature=1e-4, frequency_penalty=1.5, repetition_penalty=1.3)
    plain = run(FakeEngine(), PROMPTS, resolved)
    for drafter in DRAFTERS.values():
        speculator = Speculator(FakeEngine(), drafter(), verification, costs=StepCosts(free))
        assert result(speculate(speculator, PROMPTS, resolved)[0]) == result(plain)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b42_a_model_that_drafts_for_itself_is_always_accepted(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "pays", lambda *_: True)
    monkeypatch.setattr(Controller, "affordable", True)  # such a model takes as long as its target
    resolved = params(temperature=temperature, max_new_tokens=1 + 3 * (MOST_DRAFTED + 1))
    speculator = Speculator(FakeEngine(), ModelDrafter(FakeEngine()), costs=StepCosts(free))
    _, stats = speculate(speculator, [PROMPTS[0]], resolved)
    assert stats.drafts is not None
    assert stats.drafts.draft_acceptance_rate == 1
    assert stats.drafts.mean_acceptance_length == MOST_DRAFTED + 1
    assert stats.drafts.num_accepted_tokens_per_pos == [3] * MOST_DRAFTED
    assert (stats.drafts.num_drafts, stats.drafts.num_steps, stats.decode_tokens) == (3, 3, 48)


def test_b42_drafts_that_do_not_pay_are_left_out() -> None:
    engine, resolved = FakeEngine(), params(max_new_tokens=2 * PROBE_INTERVAL)
    speculator = Speculator(engine, ModelDrafter(other_model()), costs=StepCosts(dear))
    _, stats = speculate(speculator, [[1, 2]], resolved)
    widths = [counts[0] for _, counts in engine.calls[1:]]
    assert stats.drafts is not None
    # All steps are plain ones, but for the probe that would notice a change.
    assert widths[:PROBE_INTERVAL] == [1] * PROBE_INTERVAL
    assert widths.count(1) >= len(widths) - 2
    assert stats.drafts.num_draft_tokens <= 2


def test_tokens_of_a_draft_count_only_if_they_were_kept() -> None:
    resolved = params(temperature=0.9, eos_token_ids=frozenset([3, 8, 20]))
    speculator = Speculator(FakeEngine(), ModelDrafter(FakeEngine()), costs=StepCosts(free))
    completions, stats = speculate(speculator, PROMPTS, resolved)
    assert stats.drafts is not None
    total = stats.drafts
    assert stats.decode_tokens == sum(len(c.ids) - 1 for c in completions)
    # Every sequence ended on a drafted token, or on the one after a draft.
    assert 0 <= total.num_steps + total.num_accepted_tokens - stats.decode_tokens <= len(PROMPTS)
    assert total.num_accepted_tokens == sum(total.num_accepted_tokens_per_pos)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_steps"):
        each = [getattr(c.stats.drafts, name) for c in completions if c.stats.drafts]
        assert sum(each) == getattr(total, name)


@pytest.mark.parametrize("width", [2, 5])
def test_a_fixed_width_writes_the_same_with_every_drafter(width: int) -> None:
    resolved = params(temperature=0.9, frequency_penalty=0.4)
    plain = run(FakeEngine(), PROMPTS, resolved)
    for drafter in DRAFTERS.values():
        engine = FakeEngine()
        speculator = Speculator(engine, drafter(), width=width)
        ours, _ = speculate(speculator, PROMPTS, resolved)
        assert result(ours) == result(plain)
        decoding = [call for call in engine.calls if call[0] != [0] or call[1] == [width]]
        assert {tuple(counts) for _, counts in decoding[-5:]} == {(width,)}


def test_an_unknown_verification_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="did you mean 'rejection'"):
        Speculator(FakeEngine(), SuffixDrafter(), "rejections")


def test_b42_drafting_that_did_not_pay_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(self: StepCosts, batch: int, rows: int) -> float:
        return 1e-9

    monkeypatch.setattr(StepCosts, "seconds", halved)
    speculator = Speculator(FakeEngine(), ModelDrafter(other_model()), costs=StepCosts(free))
    with caplog.at_level(logging.WARNING, "quantkit"):
        _, stats = speculate(speculator, [[1, 2]], params(max_new_tokens=200))
    assert stats.drafts is not None
    (record,) = caplog.records
    assert "drafting did not pay: about 0.0" in record.getMessage()
    assert f"of {stats.drafts.num_draft_tokens} drafted" in record.getMessage()


def test_a_generation_begins_with_texts_that_nothing_is_known_about() -> None:
    resolved = params(temperature=0)
    speculator = Speculator(FakeEngine(), ModelDrafter(other_model()), costs=StepCosts(free))
    speculate(speculator, PROMPTS, resolved)
    acceptance = speculator._controller(sampled=False).acceptance
    assert acceptance._recent
    speculator.start(resolved, 1)
    assert not acceptance._recent
