"""A head learns what its target writes; the loss is that of the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import DataError, UnsupportedError
from quantkit.runtime.loading import load_engine
from quantkit.runtime.model import Fp8Model
from quantkit.speculative.head_data import Text, Writing, frequent_tokens, write_texts
from quantkit.speculative.head_prompts import head_prompts
from quantkit.speculative.head_questions import own_questions, question_start
from quantkit.speculative.head_training import EVALUATED_STEPS, Trainer, Training
from quantkit.speculative.head_weights import DraftHead, HeadShape, TargetEnds
from quantkit.speculative.training import train_drafter
from tests import checkpoints, tiny
from tests.runtime.fake_engine import FakeEngine

SHAPE = HeadShape(64, 128, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96)
TRAINING = Training(draft_vocab=100, steps=3, window=24, batch=16, updates=60)
WRITING = Writing(new_tokens=40, most_tokens=3000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = checkpoints.build(tmp_path_factory.mktemp("target"), checkpoints.FAMILIES["llama"]())
    return tiny.save_tokenizer(path, tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Fp8Model:
    return Fp8Model(load_engine(folder, dtype="float32"), folder)


@pytest.fixture(scope="module")
def ends(folder: Path) -> TargetEnds:
    return TargetEnds.read(open_checkpoint(folder))


@pytest.fixture(scope="module")
def texts(model: Fp8Model) -> list[Text]:
    return write_texts(model.engine, head_prompts(model, [], 0), frozenset([2]), WRITING, 60.0)


def trainer(ends: TargetEnds, texts: list[Text], **changes: Any) -> Trainer:
    return Trainer(SHAPE, ends, texts, replace(TRAINING, **changes))


def test_texts_are_the_targets_own_with_its_states(texts: list[Text], model: Fp8Model) -> None:
    assert sum(map(len, texts)) >= WRITING.most_tokens
    for text in texts[:3]:
        logits = model.logits(text.tokens[None, :-1])[0]
        assert torch.allclose(logits.logsumexp(-1), text.log_sums, atol=1e-3)
        engine: Any = model.engine
        assert torch.allclose(engine.head(text.states), logits, atol=1e-3)
    # The first batch is greedy: each token after the prompt is the likeliest.
    logits = model.logits(texts[0].tokens[None, :-1])[0]
    assert torch.equal(logits.argmax(-1)[-20:], texts[0].tokens[-20:])


def test_a_head_learns_what_its_target_writes(texts: list[Text], ends: TargetEnds) -> None:
    # Greedy and sampled texts of random weights: far from what one layer can learn in a second,
    # and far from chance, which is a hundredth.
    learning = trainer(ends, texts)
    before = learning.evaluate()
    losses: list[float] = []
    head = learning.run(60.0, lambda share, loss: losses.append(loss))
    assert head.report["updates"] == len(losses) == TRAINING.updates
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    for name in ("sampled_acceptance", "greedy_acceptance"):
        after = head.report[name]
        assert len(after) == EVALUATED_STEPS
        assert after[0] > before[name][0] + 0.02
    assert head.token_ids.tolist() == sorted(head.token_ids.tolist())
    assert len(head.token_ids) == TRAINING.draft_vocab


@pytest.mark.parametrize(("share", "distance_share"), [(0.0, 0.0), (0.7, 0.45), (1.0, 0.9)])
def test_the_loss_turns_from_cross_entropy_to_total_variation(
    texts: list[Text], ends: TargetEnds, model: Fp8Model, share: float, distance_share: float
) -> None:
    learning = trainer(ends, texts, steps=1, draft_vocab=90)
    text = max(texts, key=len)
    batch = learning._batch([(text, 3)], 10)
    guess = learning.model.unroll(batch.known, batch.embedded, 1)[0][0]
    columns = learning.token_ids
    q = torch.zeros(10, 128)
    q[:, columns] = (guess @ ends.output[columns].float().T).softmax(-1)
    p = model.logits(text.tokens[None, :13])[0, 3:].softmax(-1)
    distance = 0.5 * (p - q).abs().sum(-1).mean()
    entropy = -(p[:, columns] * q[:, columns].log()).sum(-1).mean()
    expected = distance_share * distance + (1 - distance_share) * entropy
    assert float(learning._loss(batch, share).detach()) == pytest.approx(
        float(expected.detach()), rel=1e-3
    )


@pytest.mark.parametrize("family", ["granite", "gemma3"])
def test_what_a_target_does_to_its_logits_is_done_in_training_too(
    tmp_path: Path, family: str
) -> None:
    path = checkpoints.build(tmp_path / family, checkpoints.FAMILIES[family]())
    engine: Any = load_engine(path, dtype="float32")
    hidden = torch.randn(5, engine.hidden_size)
    ends = TargetEnds.read(open_checkpoint(path))
    products = hidden @ ends.output.float().T
    assert torch.allclose(ends.logits(products), engine.head(hidden), atol=1e-5)
    assert not torch.allclose(products, engine.head(hidden), atol=1e-2)


def test_training_repeats_with_a_seed(texts: list[Text], ends: TargetEnds) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return trainer(ends, texts, updates=3, seed=seed).run(60.0).weights

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["qkv"], other["qkv"])


def test_frequent_tokens_come_first_and_low_ids_fill_up() -> None:
    states, sums = torch.zeros(3, 4), torch.zeros(3)
    texts = [Text(torch.tensor(ids), states, sums) for ids in ([9, 9, 7, 7], [9, 5, 5, 8])]
    assert frequent_tokens(texts, 10, 2).tolist() == [5, 9]
    assert frequent_tokens(texts, 10, 6).tolist() == [0, 1, 5, 7, 8, 9]
    assert frequent_tokens(texts, 10, 99).tolist() == list(range(10))


def test_too_little_text_is_an_error(ends: TargetEnds, texts: list[Text]) -> None:
    with pytest.raises(DataError, match="0 texts are long enough"):
        trainer(ends, [Text(text.tokens[:3], text.states[:2], text.log_sums[:2]) for text in texts])


def test_what_is_reported_is_about_tokens_that_the_target_wrote(
    texts: list[Text], ends: TargetEnds, model: Fp8Model
) -> None:
    learning = trainer(ends, texts, draft_vocab=30)
    agreeing, written = [0, 0], [0, 0]
    for text in [text for text in texts if len(text) > EVALUATED_STEPS + 1][::20]:
        batch = learning._batch([(text, 0)], len(text))
        guesses = learning.model.unroll(batch.known, batch.embedded, 2)
        likeliest = model.logits(text.tokens[None, :-1])[0].argmax(-1)
        for step, guess in enumerate(guesses):
            places = (guess[0] @ ends.output[learning.token_ids].float().T).argmax(-1)
            for place in range(max(step, text.prompt - 1), len(text)):
                written[step] += 1
                agreeing[step] += int(learning.token_ids[places[place]] == likeliest[place])
    expected = [hits / count for hits, count in zip(agreeing, written, strict=True)]
    # Products in bfloat16 may turn a few near ties around.
    greedy = learning.evaluate()["greedy_acceptance"]
    assert greedy[:2] == pytest.approx(expected, abs=0.01)
    assert written[0] < 0.9 * sum(map(len, texts)) / 20


def test_prompts_are_questions_tasks_excerpts_and_free_starts(model: Fp8Model) -> None:
    words = " ".join(tiny.WORDS)
    prompts = head_prompts(model, [words], seed=3)
    some = [next(prompts) for _ in range(40)]
    assert some[0] == model.encode("")
    assert all(0 < len(prompt) <= model.engine.max_context // 2 for prompt in some)
    again = head_prompts(model, [words], seed=3)
    assert [next(again) for _ in range(40)] == some
    assistant = model.tokenizer.convert_tokens_to_ids("assistant")
    assert sum(assistant in prompt for prompt in some) > 10  # long ones are cut
    assert any(len(set(prompt)) > 15 for prompt in some)
    assert len(set(map(tuple, some))) > 30


def test_questions_are_what_the_model_makes_of_the_chats_beginning(model: Fp8Model) -> None:
    chat = model.encode_chat([{"role": "user", "content": "red blue"}])
    start = question_start(model)
    assert chat[: len(start)] == start
    assert chat[len(start) :][:2] == model.encode("red blue")[-2:]
    questions = own_questions(model, seed=5)
    some = [next(questions) for _ in range(70)]  # more than one batch of them
    assert all(question[: len(start)] == start for question in some)
    assert len(set(map(tuple, some))) > 60


def test_without_a_chat_template_prompts_are_plain(folder: Path) -> None:
    model = Fp8Model(load_engine(folder, dtype="float32"), folder)
    model.tokenizer.chat_template = None
    prompts = head_prompts(model, [], seed=0)
    some = [next(prompts) for _ in range(40)]
    assistant = model.tokenizer.convert_tokens_to_ids("assistant")
    assert not any(assistant in prompt for prompt in some)


def test_the_whole_way_from_a_model_to_its_drafter(model: Fp8Model, tmp_path: Path) -> None:
    lines: list[str] = []
    head = train_drafter(
        model,
        minutes=5,
        training=replace(TRAINING, updates=10),
        writing=replace(WRITING, most_tokens=800),
        report=lines.append,
    )
    assert head.report["tokens"] >= 800
    assert lines[0].startswith("written ")
    assert lines[-1].startswith("trained 100%")
    assert DraftHead.load(head.save(tmp_path / "draft")).report["updates"] == 10


def test_a_model_that_shows_no_states_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="hidden states, which FakeEngine does not give"):
        train_drafter(Fp8Model(FakeEngine(128), folder))
