"""Served models: what a server answers is what the same weights give here."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.errors import QuantKitError, UnsupportedError
from quantkit.evaluate import TaskResult, evaluate_tasks
from tests import checkpoints, tiny
from tests.evaluate.server import Served, serve
from tests.evaluate.task_files import write_tasks

pytest.importorskip("lm_eval", reason="needs the extra eval")

from quantkit.evaluate.endpoint import ServedChat, ServedCompletions, find_endpoint

EXACT = {"kv": "none", "activations": "skip"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


@pytest.fixture(scope="module")
def checkpoint(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "fp8"
    shutil.copytree(quantized / "fp8", folder)
    tiny.save_tokenizer(folder, tiny.CHAT_TEMPLATE)
    return folder


@pytest.fixture
def served(checkpoint: Path) -> Served:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return Served("tiny-fp8", checkpoints.reference_model(checkpoint), tokenizer, 200)


@pytest.fixture
def address(served: Served) -> Iterator[str]:
    with serve(served) as url:
        yield url


def run(checkpoint: Path, tasks: Path, *names: str, **options: Any) -> TaskResult:
    options = {"include_path": tasks, "progress": False, **options}
    return evaluate_tasks(checkpoint, tasks=list(names), **options)


@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_a_served_model_scores_what_the_checkpoint_scores_here(
    chat: bool, at_a_time: int, checkpoint: Path, tasks: Path, address: str, served: Served
) -> None:
    names = ("words_mc", "words_gen")
    options = {"apply_chat_template": chat, "num_fewshot": 1}
    here = run(checkpoint, tasks, *names, **options, **EXACT)
    there = run(checkpoint, tasks, *names, endpoint=address, batch_size=at_a_time, **options)
    assert [score.task for score in there.scores] == [score.task for score in here.scores]
    for a, b in zip(here.scores, there.scores, strict=True):
        assert b.quantized == pytest.approx(a.quantized)
    assert there.setting.quantized_by == f"tiny-fp8 at {address}/completions"
    prompts = [body["prompt"][0] for _, body in served.requests]
    assert all(ids[0] == tiny.BOS_ID != ids[1] for ids in prompts)


@pytest.mark.parametrize("chat", [False, True])
def test_free_answers_are_those_that_the_checkpoint_writes_here(
    chat: bool, checkpoint: Path, tasks: Path, address: str, served: Served, tmp_path: Path
) -> None:
    shutil.copytree(tasks, tmp_path / "tasks")
    rows = [json.loads(line) for line in (tasks / "questions.jsonl").read_text().splitlines()]
    for row in rows[:5]:  # the right answer is what the model writes
        row["choices"][row["answer"]] = served.answer(row["question"], 6, ["house"], chat)
    tiny.write_jsonl(tmp_path / "tasks" / "questions.jsonl", rows)
    end = "/chat/completions" if chat else ""
    there = run(checkpoint, tmp_path / "tasks", "words_gen", endpoint=address + end)
    here = run(checkpoint, tmp_path / "tasks", "words_gen", apply_chat_template=chat, **EXACT)
    assert there.setting.chat_template == chat
    assert there.scores[0].quantized == here.scores[0].quantized == 5 / 12
    assert {path for path, _ in served.requests} == {f"/v1{end or '/completions'}"}


def test_original_and_quantized_may_both_be_served(
    checkpoint: Path, quantized: Path, tasks: Path, address: str, served: Served
) -> None:
    original = AutoModelForCausalLM.from_pretrained(quantized / "source").eval()
    with serve(Served("tiny", original, served.tokenizer, 256)) as url:
        result = run(
            checkpoint,
            tasks,
            "words_mc",
            endpoint=address,
            model="tiny-fp8",
            reference_endpoint=url,
            reference_model="tiny",
            max_drop=1.0,
        )
    here = run(checkpoint, tasks, "words_mc", reference=quantized / "source", **EXACT)
    for a, b in zip(here.scores, result.scores, strict=True):
        assert b.quantized == pytest.approx(a.quantized)
        assert b.original == pytest.approx(a.original)
        assert b.change == a.change
    assert result.setting.original_by == f"tiny at {url}/completions"


def test_a_long_prompt_is_cut_to_what_the_server_takes(
    checkpoint: Path, tasks: Path, address: str, served: Served
) -> None:
    run(checkpoint, tasks, "words_mc", endpoint=address, num_fewshot=11, limit=2)
    lengths = [len(body["prompt"][0]) for _, body in served.requests]
    assert max(lengths) <= served.max_model_len - 1


def test_a_server_without_log_probabilities_of_prompts_gives_no_score(
    checkpoint: Path, tasks: Path, address: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the harness tries again
    served.echoes = False
    with pytest.raises(UnsupportedError, match="gave 1 log-probabilities for a prompt of"):
        run(checkpoint, tasks, "words_mc", endpoint=address, batch_size=1, limit=2)


def test_likelihoods_are_not_asked_in_messages(checkpoint: Path, tasks: Path, address: str) -> None:
    with pytest.raises(UnsupportedError, match="compares likelihoods"):
        run(checkpoint, tasks, "words_mc", endpoint=f"{address}/chat/completions")


def test_answers_without_text_are_counted(
    checkpoint: Path, tasks: Path, address: str, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.content = None
    with caplog.at_level(logging.WARNING, "quantkit"):
        result = run(checkpoint, tasks, "words_gen", endpoint=f"{address}/chat/completions")
    assert result.scores[0].quantized == 0
    assert "the quantized model gave 12 answers without text" in caplog.text


def test_a_server_that_is_gone_is_one_line(checkpoint: Path, tasks: Path) -> None:
    with pytest.raises(QuantKitError, match=r"nothing answers at http://127\.0\.0\.1:9/v1"):
        run(checkpoint, tasks, "words_mc", endpoint="http://127.0.0.1:9/v1")


def test_models_are_found_by_name(address: str) -> None:
    found = find_endpoint(address + "/", None)
    assert (found.url, found.chat, found.model, found.max_length) == (
        address, False, "tiny-fp8", 200,
    )  # fmt: skip
    assert find_endpoint(f"{address}/chat/completions", "tiny-fp8").chat
    assert find_endpoint(f"{address}/completions", None).url == address
    with pytest.raises(UnsupportedError, match=r"does not serve 'tiny-fp9' .*'tiny-fp8'"):
        find_endpoint(address, "tiny-fp9")
    with pytest.raises(UnsupportedError, match="is no address"):
        find_endpoint("host:8000", None)


def test_a_server_that_lists_no_models_needs_a_name(address: str) -> None:
    other = address.removesuffix("/v1") + "/v2"
    with pytest.raises(UnsupportedError, match="does not list its models"):
        find_endpoint(other, None)
    assert find_endpoint(other, "any").model == "any"


TOP = {"a": -1.0}


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"token_logprobs": [None, -1.0, -1.0], "top_logprobs": [None, TOP, TOP]},
        {"token_logprobs": [None, -1.0, None, -1.0], "top_logprobs": [None, TOP, TOP, TOP]},
        {"token_logprobs": [None, -1.0, -1.0, -1.0], "top_logprobs": None},
    ],
)
def test_missing_log_probabilities_are_no_zeros(logprobs: Any) -> None:
    whole = {"token_logprobs": [None, -1.0, -2.0, -1.0], "top_logprobs": [None, TOP, TOP, TOP]}
    prompt = [[5, 6, 7]]
    answer = {"choices": [{"index": 0, "logprobs": whole}]}
    assert ServedCompletions.parse_logprobs([answer], prompt, [2]) == [(-2.0, False)]
    answer = {"choices": [{"index": 0, "logprobs": logprobs}]}
    with pytest.raises(UnsupportedError, match="log-probabilities"):
        ServedCompletions.parse_logprobs([answer], prompt, [2])
    with pytest.raises(UnsupportedError, match="1 prompts got 0 answers"):
        ServedCompletions.parse_logprobs([{"choices": []}], prompt, [2])


@pytest.mark.parametrize(
    "answer", [{"error": "x"}, {"choices": [{"index": 0}]}, {"choices": [None]}, None]
)
def test_an_answer_that_is_none_is_an_error(answer: Any) -> None:
    chat = ServedChat(base_url="http://x/v1/chat/completions", model="m")
    with pytest.raises(UnsupportedError, match="the server"):
        chat.parse_generations(answer)
