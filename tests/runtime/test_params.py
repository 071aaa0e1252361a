from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from quantkit.errors import GenerationError
from quantkit.runtime.params import DEFAULT_MAX_NEW_TOKENS, SamplingParams, sampling_params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("temperature", -0.5),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("max_new_tokens", -1),
        ("min_new_tokens", -1),
        ("logprobs", -1),
        ("seed", 1.5),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(GenerationError, match=name) as caught:
        SamplingParams(**{name: value})
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert str(shown) in str(caught.value)


def test_the_default_is_greedy_even_if_a_temperature_is_listed() -> None:
    listed = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    assert SamplingParams().resolve(listed, 10).temperature == 0
    assert SamplingParams().resolve({"temperature": 0.6}, 10).temperature == 0
    assert SamplingParams().resolve({}, 10).temperature == 0


def test_do_sample_brings_the_listed_values() -> None:
    listed = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    resolved = SamplingParams().resolve(listed, 10)
    assert (resolved.temperature, resolved.top_k, resolved.repetition_penalty) == (0.6, 20, 1.1)
    assert SamplingParams().resolve({"do_sample": True}, 10).temperature == 1.0


def test_what_the_caller_says_wins() -> None:
    listed = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 5}
    resolved = SamplingParams(temperature=0, top_k=0, max_new_tokens=0).resolve(listed, 10)
    assert (resolved.temperature, resolved.top_k, resolved.max_new_tokens) == (0, 0, 0)


def test_max_new_tokens_has_a_default() -> None:
    assert SamplingParams().resolve({}, 10).max_new_tokens == DEFAULT_MAX_NEW_TOKENS
    assert SamplingParams().resolve({"max_new_tokens": 7}, 10).max_new_tokens == 7


@pytest.mark.parametrize("listed", [[2, 7], [7, 2]])
def test_b30_every_eos_id_counts_in_any_order(listed: list[int]) -> None:
    resolved = SamplingParams(stop_token_ids=[4]).resolve({"eos_token_id": listed}, 10)
    assert resolved.ending_ids == {2, 4, 7}
    ignoring = SamplingParams(stop_token_ids=[4], ignore_eos=True)
    assert ignoring.resolve({"eos_token_id": listed}, 10).ending_ids == {4}


def test_b30_an_eos_id_outside_the_vocabulary_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="quantkit"):
        resolved = SamplingParams().resolve({"eos_token_id": [2, 99]}, 10)
    assert resolved.ending_ids == {2}
    assert "99" in caplog.text


def test_a_filter_without_effect_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quantkit"):
        SamplingParams(top_p=0.9).resolve({}, 10)
        assert "top_p has no effect" in caplog.text
        caplog.clear()
        SamplingParams(top_p=0.9, temperature=0).resolve({}, 10)
        SamplingParams(top_p=0.9).resolve({"do_sample": True}, 10)
        assert caplog.text == ""


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"eos_token_id": "end"}, "generation_config.json: eos_token_id holds 'end'"),
        ({"top_p": 3.0}, r"generation_config.json: top_p must be in \(0, 1\], got 3.0"),
    ],
)
def test_bad_defaults_name_their_file(listed: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        SamplingParams().resolve(listed, 10)


@pytest.mark.parametrize("field", [{"stop_token_ids": [10]}, {"logit_bias": {-1: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(GenerationError, match="outside the vocabulary of 10"):
        SamplingParams(**field).resolve({}, 10)


def test_a_missing_seed_is_drawn_afresh_and_a_given_one_is_kept() -> None:
    drawn = {SamplingParams().resolve({}, 10).seed for _ in range(4)}
    assert len(drawn) == 4
    assert SamplingParams(seed=0).resolve({}, 10).seed == 0


def test_options_replace_single_fields_and_typos_are_named() -> None:
    params = sampling_params(SamplingParams(temperature=0.5, stop=["x"]), {"top_k": 3})
    assert (params.temperature, params.top_k, params.stop) == (0.5, 3, ["x"])
    with pytest.raises(GenerationError, match=r"'max_tokens' \(did you mean 'max_new_tokens'\?\)"):
        sampling_params(None, {"max_tokens": 3})
