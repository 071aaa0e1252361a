"""`load_fp8(draft=...)` on real tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from quantkit import load_fp8
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.runtime.model import Fp8Model
from quantkit.speculative.controller import Controller
from quantkit.speculative.step_costs import StepCosts
from quantkit.speculative.suffix import SuffixDrafter
from tests import checkpoints, tiny

Prompts = list[list[int]]
PROMPTS: Prompts = [tiny.random_ids(count, seed=count).tolist() for count in (9, 2, 5)]
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.0},
    {"logit_bias": {5: 3.0, 9: -float("inf")}},
    {"min_new_tokens": 20},
]


def build(folder: Path, vocab: int = 128, seed: int = 0) -> Path:
    """A tiny checkpoint; the same seed gives the same weights where shapes agree."""
    config = transformers.LlamaConfig(**{**tiny.LLAMA, "vocab_size": vocab})
    folder.mkdir()
    path = checkpoints.build(folder, config)
    if seed:  # other weights: shift the embedding by a few tokens
        embedding = checkpoints.tensor(path, "model.embed_tokens.weight")
        checkpoints.add(path, "model.embed_tokens.weight", embedding.roll(seed, 0).contiguous())
    tiny.save_tokenizer(path)
    return path


@pytest.fixture(autouse=True)
def _always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models this small drafting would rarely pay."""
    monkeypatch.setattr(Controller, "pays", lambda *_: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("other") / "model", seed=3)


def load(path: Path, draft: Any = None, **options: Any) -> Fp8Model:
    return load_fp8(path, draft=draft, dtype="float32", **options)


def ids(model: Fp8Model, prompts: Prompts = PROMPTS, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 24, "temperature": 0, "seed": 1, **options}
    return [completion.ids for completion in model.generate_ids(prompts, **options)]


@pytest.mark.parametrize("draft", ["none", "suffix", "auto", None])
def test_drafts_by_name_change_nothing(draft: str | None, target: Path) -> None:
    model, plain = load(target, draft), load(target)
    for options in ({}, {"temperature": 0.8}):
        assert ids(model, **options) == ids(plain, **options)
    assert plain.stats.drafts is None
    if draft in ("suffix", "auto"):
        assert model.stats.drafts is not None
        assert model.stats.drafts.num_draft_tokens > 0
    else:
        assert model.stats.drafts is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b42_a_model_drafts_for_itself_and_another_for_it(
    temperature: float, target: Path, other: Path
) -> None:
    plain = ids(load(target), temperature=temperature)
    for draft in (target, other):
        assert ids(load(target, draft), temperature=temperature) == plain
    model = load(target, target)
    ids(model, temperature=temperature)
    assert model.stats.drafts is not None
    if EXTENSION_LOADED:
        assert model.stats.drafts.draft_acceptance_rate == 1


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: next(iter(penalty)))
def test_b38_every_option_gives_the_same_tokens_with_a_draft(
    penalty: dict[str, Any], target: Path, other: Path
) -> None:
    assert ids(load(target, other), **penalty) == ids(load(target), **penalty)


@pytest.mark.parametrize("vocab", [112, 144])
def test_b37_padded_and_cut_vocabularies_work(vocab: int, target: Path, tmp_path: Path) -> None:
    # The tokenizer has 128 tokens; the draft's matrix has fewer rows, or padding after them.
    draft = build(tmp_path / "draft", vocab)
    for options in ({}, {"temperature": 0.9}):
        assert ids(load(target, draft), **options) == ids(load(target), **options)


def test_b37_a_larger_vocabulary_of_the_target_works(tmp_path: Path, target: Path) -> None:
    padded = build(tmp_path / "padded", 144)
    assert ids(load(padded, target), temperature=0.9) == ids(load(padded), temperature=0.9)


def test_b37_a_permuted_tokenizer_is_refused_with_the_first_difference(
    target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "permuted"
    shutil.copytree(target, draft)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["the"], vocab["sun"] = vocab["sun"], vocab["the"]
    (draft / "tokenizer.json").write_text(json.dumps(content))
    first = min(vocab["the"], vocab["sun"])
    with pytest.raises(UnsupportedError, match=rf"token {first} is 'sun' there and 'the' here"):
        load(target, draft)


def test_a_draft_without_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "bare"
    shutil.copytree(target, draft)
    for file in draft.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"bare has no tokenizer, so whether"):
        load(target, draft)


def test_what_is_not_known_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'sufix'.*did you mean 'suffix'"):
        load_fp8(tmp_path, draft="sufix")
    with pytest.raises(UnsupportedError, match=r"verification 'blok'.*did you mean 'block'"):
        load_fp8(tmp_path, draft="suffix", verification="blok")


@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_deterministic_text_does_not_depend_on_drafts_nor_on_the_batch(
    draft: str, target: Path, other: Path
) -> None:
    options = {"temperature": 0.9}
    plain = load(target, deterministic=True)
    drafting = load(target, other if draft == "model" else draft, deterministic=True)
    together = ids(plain, **options)
    assert ids(drafting, **options) == together
    assert ids(plain, PROMPTS[:1], **options) == together[:1]


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_other_verifications_are_greedy_where_that_is_asked_for(
    verification: str, target: Path, other: Path
) -> None:
    model = load(target, other, verification=verification)
    assert ids(model) == ids(load(target))
    assert len(ids(model, temperature=0.9)) == len(PROMPTS)


def test_texts_to_look_in_and_a_drafter_of_ones_own(target: Path) -> None:
    plain = load(target)
    words = "the cat of the sun and the moon"
    known = plain.generate(words, max_new_tokens=20)
    for model in (
        load(target, "suffix", draft_texts=[words + known]),
        load(target, SuffixDrafter([plain.encode(words + known)])),
    ):
        assert model.generate(words, max_new_tokens=20) == known
        assert model.stats.drafts is not None


@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_nothing_to_do_is_nothing_done(draft: str, target: Path, other: Path) -> None:
    model = load(target, other if draft == "model" else draft)
    assert ids(model, []) == []
    assert ids(model, max_new_tokens=0) == [[]] * len(PROMPTS)
    assert ids(model, max_new_tokens=1) == ids(load(target), max_new_tokens=1)


def test_streams_and_statistics(target: Path) -> None:
    model = load(target, "suffix")
    words = "one two three one two three one two"
    text = load(target).generate(words, max_new_tokens=30)
    assert "".join(model.stream(words, max_new_tokens=30)) == text
    summary = model.stats.to_dict()["drafts"]
    assert summary["num_steps"] >= summary["num_drafts"]
    assert set(summary) >= {
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "speed_up",
    }
