from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError, DataError, QuantKitError, UnsupportedError
from quantkit.evaluate import TaskResult, evaluate_tasks
from quantkit.evaluate import sides as sides_module
from tests import checkpoints, tiny
from tests.evaluate.task_files import QUESTIONS, write_tasks

pytest.importorskip("lm_eval", reason="needs the extra eval")

EXACT = {"kv": "none", "activations": "skip"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


@pytest.fixture(scope="module")
def dequantized(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source whose weights are the checkpoint's."""
    folder = tmp_path_factory.mktemp("dequantized")
    checkpoints.reference_model(quantized / "fp8").save_pretrained(folder)
    return folder


def run(quantized: Path, folder: Path, *tasks: str, **options: Any) -> TaskResult:
    options = {"include_path": folder, "progress": False, **options}
    return evaluate_tasks(quantized / "fp8", tasks=list(tasks), **options)


def test_the_same_weights_give_the_same_scores(
    quantized: Path, folder: Path, dequantized: Path
) -> None:
    names = ("words_mc", "words_gen", "words_text")
    result = run(quantized, folder, *names, reference=dequantized, **EXACT)
    found = {(score.task, score.metric): score for score in result.scores}
    assert set(found) == {
        ("words_mc", "acc"),
        ("words_mc", "acc_norm"),
        ("words_gen", "exact_match"),
        ("words_text", "word_perplexity"),
    }
    for score in found.values():
        assert score.quantized == pytest.approx(score.original, rel=1e-5)
    for metric in ("acc", "acc_norm"):
        change = found["words_mc", metric].change
        assert change is not None
        assert (change.difference, change.standard_error) == (0, 0)
        assert (change.lost, change.won) == (0, 0)
    text = found["words_text", "word_perplexity"]
    assert text.higher_is_better is False
    assert text.change is not None
    assert (text.change.standard_error, text.change.lost) == (None, None)
    assert 0 < found["words_mc", "acc"].quantized < 1


def test_accuracy_is_that_of_the_definition(
    quantized: Path, folder: Path, dequantized: Path
) -> None:
    (score, _) = run(quantized, folder, "words_mc", **EXACT).scores
    model = checkpoints.reference_model(quantized / "fp8")
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]

    def ids(text: str) -> list[int]:
        return [len(tiny.SPECIAL_TOKENS) + tiny.WORDS.index(word) for word in text.split()]

    right = []
    for row in rows:
        totals = []
        for choice in row["choices"]:
            context, answer = [tiny.BOS_ID, *ids(row["question"])], ids(choice)
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *answer]])).logits[0].log_softmax(-1)
            places = range(len(context) - 1, len(context) + len(answer) - 1)
            totals.append(sum(float(logits[p, i]) for p, i in zip(places, answer, strict=True)))
        right.append(int(np.argmax(totals)) == row["answer"])
    assert score.quantized == pytest.approx(np.mean(right))
    assert score.quantized_standard_error == pytest.approx(
        np.std(right, ddof=1) / len(right) ** 0.5
    )
    assert (score.questions, score.available, score.num_fewshot) == (QUESTIONS, QUESTIONS, 0)
    assert (score.original, score.change) == (None, None)


def test_quantization_is_measured_with_paired_errors(quantized: Path, folder: Path) -> None:
    result = run(quantized, folder, "words_mc", reference=quantized / "source", num_fewshot=2)
    (score, _) = result.scores
    assert score.num_fewshot == 2
    assert score.change is not None
    assert score.original is not None
    assert score.change.lost is not None
    assert score.change.won is not None
    difference = score.quantized - score.original
    assert score.change.difference == pytest.approx(difference)
    assert difference == pytest.approx((score.change.won - score.change.lost) / QUESTIONS)
    assert result.setting.original_by == "source in transformers, float32"
    assert "FP8 KV, activations quantized as an 8-bit engine does" in result.setting.quantized_by


def test_a_group_is_the_mean_of_its_tasks(quantized: Path, folder: Path) -> None:
    result = run(
        quantized, folder, "words_group", reference=quantized / "source", limit=5, max_drop=2.0
    )
    group, *single = result.scores
    assert (group.task, group.metric, group.questions) == ("words_group", "acc", 10)
    assert group.available == 2 * QUESTIONS
    accuracies = [score.quantized for score in single if score.metric == "acc"]
    assert len(accuracies) == 2
    assert group.quantized == pytest.approx(np.mean(accuracies))
    assert group.change is not None
    assert group.change.standard_error is not None
    assert result.gated == {"words_group"}
    assert result.violations == []


def test_a_chat_template_changes_what_is_asked(
    quantized: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(quantized / "fp8", tmp_path / "fp8")
    tiny.save_tokenizer(tmp_path / "fp8", tiny.CHAT_TEMPLATE)
    plain, chat = (
        run(tmp_path, folder, "words_gen", "words_mc", apply_chat_template=each)
        for each in (False, True)
    )
    assert chat.setting.chat_template
    assert "chat template applied" in str(chat.setting)
    assert [score.quantized for score in plain.scores] != [s.quantized for s in chat.scores]
    with pytest.raises(UnsupportedError, match="has no chat template"):
        run(quantized, folder, "words_mc", apply_chat_template=True)


def test_the_adapter_for_the_original_holds_few_logits(
    quantized: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    sizes: list[int] = []
    call = HFLM._model_call

    def counted(self: Any, inps: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(inps.numel())
        return call(self, inps, *args, **options)

    monkeypatch.setattr(HFLM, "_model_call", counted)
    run(quantized, folder, "words_mc", reference=quantized / "source")
    assert max(sizes) > 40
    sizes.clear()
    monkeypatch.setattr(sides_module, "LOGIT_BYTES", 2 * 4 * tiny.VOCAB_SIZE * 30)
    run(quantized, folder, "words_mc", reference=quantized / "source")
    assert max(sizes) <= 30


def test_examples_that_a_task_fixes_are_said(
    quantized: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path / "tasks")
    path = tmp_path / "tasks" / "words_mc.yaml"
    path.write_text(path.read_text() + "num_fewshot: 0\n")
    with caplog.at_level(logging.WARNING, "quantkit"):
        result = run(quantized, tmp_path / "tasks", "words_mc", num_fewshot=3, limit=2)
    assert result.scores[0].num_fewshot == 0
    assert "task words_mc fixes 0 examples" in caplog.text


def test_prompts_that_are_cut_are_counted(
    quantized: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tight = run(quantized, folder, "words_mc", num_fewshot=11, limit=2)
    assert tight.setting.truncated == 0
    rows = [{"question": tiny.sentence(300), "choices": ["a", "b"], "answer": 0}] * 2
    shutil.copytree(folder, folder.parent / "long")
    tiny.write_jsonl(folder.parent / "long" / "questions.jsonl", rows)
    with caplog.at_level(logging.WARNING, "quantkit"):
        cut = run(quantized, folder.parent / "long", "words_mc")
    assert cut.setting.truncated == 2 * 2
    assert "4 prompts are longer than the model's context" in caplog.text


def test_a_damaged_model_has_no_score(quantized: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(quantized / "fp8", tmp_path / "fp8")
    norm = checkpoints.tensor(tmp_path / "fp8", "model.norm.weight")
    norm[3] = torch.nan
    checkpoints.add(tmp_path / "fp8", "model.norm.weight", norm)
    with pytest.raises(QuantKitError, match="finite"):
        run(tmp_path, folder, "words_mc")


def test_a_damaged_original_has_no_score(
    quantized: Path, folder: Path, dequantized: Path, tmp_path: Path
) -> None:
    shutil.copytree(dequantized, tmp_path / "source")
    head = checkpoints.tensor(tmp_path / "source", "lm_head.weight")
    head[5] = torch.nan
    checkpoints.add(tmp_path / "source", "lm_head.weight", head)
    with pytest.raises(QuantKitError, match="the original gave a likelihood of nan"):
        run(quantized, folder, "words_mc", reference=tmp_path / "source")


def test_the_harness_is_optional(
    quantized: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    with pytest.raises(UnsupportedError, match=r'pip install "quantkit\[eval\]"'):
        run(quantized, folder, "words_mc")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tasks": []}, DataError, "names no task"),
        ({"tasks": ["words_mc", ""]}, DataError, "names no task"),
        ({"limit": 0}, DataError, "--limit must be at least 1, got 0"),
        ({"num_fewshot": -1}, DataError, "--num-fewshot must be at least 0"),
        ({"batch_size": 0}, DataError, "--batch-size must be at least 1"),
        ({"max_drop": 0.1}, UnsupportedError, "give --reference"),
        ({"model": "x"}, UnsupportedError, "give --endpoint"),
        ({"reference_model": "x"}, UnsupportedError, "give --reference-endpoint"),
        (
            {"reference": "a", "reference_endpoint": "http://b"},
            UnsupportedError,
            "--reference or --reference-endpoint",
        ),
        ({"kv": "fp4"}, UnsupportedError, "--kv 'fp4' is not known"),
        ({"include_path": Path("absent")}, DataError, "--include-path absent is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: dict[str, Any],
    error: type[QuantKitError],
    message: str,
    quantized: Path,
    folder: Path,
) -> None:
    options = {"tasks": ["words_mc"], "include_path": folder, "progress": False, **options}
    with pytest.raises(error, match=message):
        evaluate_tasks(quantized / "fp8", **options)


def test_another_vocabulary_is_refused(quantized: Path, folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from tests.evaluate.conftest import CONFIG

    other = tiny.save_model(tmp_path, LlamaConfig(**{**CONFIG, "vocab_size": 130}))
    with pytest.raises(UnsupportedError, match=r"has a vocabulary of 130 .* one of 128"):
        run(quantized, folder, "words_mc", reference=other)


def test_a_broken_checkpoint_is_refused_before_tasks_are_read(
    quantized: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(quantized / "fp8", tmp_path / "fp8")
    weights = tmp_path / "fp8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        run(tmp_path, folder, "words_mc")
