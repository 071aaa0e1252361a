"""QuantkitLM against the harness's own adapter for transformers, on the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quantkit import load_fp8
from quantkit.errors import DataError, UnsupportedError
from tests import checkpoints, tiny

pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from quantkit.evaluate.harness import QuantkitLM

WORDS = tiny.sentence(600).split()


def words(start: int, end: int) -> str:
    return " ".join(WORDS[start:end])


PAIRS = [
    *((words(0, 20), " " + words(n, n + length)) for n, length in ((20, 1), (30, 3), (40, 9))),
    *((words(0, 25), " " + words(n, n + 1)) for n in range(50, 54)),
    ("<s> " + words(5, 9), " " + words(9, 12)),  # writes BOS itself
    ("", words(70, 75)),
    ("", "<s> " + words(70, 75)),
    (words(3, 9) + "  ", words(80, 82)),  # spaces at the end belong to the continuation
    (words(0, 300), " " + words(300, 310)),  # longer than the context
    (words(0, 250), " " + words(250, 300)),
    (words(0, 256), " " + words(256, 257)),
    (words(9, 10), " " + words(10, 12)),
    (words(0, 20), " " + words(30, 33)),  # asked twice
]


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def both(
    request: pytest.FixtureRequest, quantized: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[QuantkitLM, HFLM]:
    folder = tmp_path_factory.mktemp("harness") / "fp8"
    shutil.copytree(quantized / "fp8", folder)
    tiny.save_tokenizer(folder, tiny.CHAT_TEMPLATE, add_bos=request.param)
    model = load_fp8(folder, dtype="float32", kv="none", activations="full")
    theirs = HFLM(
        checkpoints.reference_model(folder),
        backend="causal",
        tokenizer=AutoTokenizer.from_pretrained(folder),
        batch_size=4,
    )
    return QuantkitLM(model, batch_size=4), theirs


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)
        for number, each in enumerate(arguments)
    ]


def test_log_likelihoods_are_those_of_the_harness(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, theirs = both
    found = ours.loglikelihood(requests("loglikelihood", PAIRS))
    wanted = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([v for v, _ in wanted], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert ours.max_length == theirs.max_length == 256
    adds_bos = ours.tok_encode("cat")[0] == tiny.BOS_ID
    assert ours.truncated == (3 if adds_bos else 2)


def test_a_greedy_continuation_is_told(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, theirs = both
    context = words(0, 8)
    ids = ours.tok_encode(context)
    logits = theirs.model(torch.tensor([ids])).logits[0, -1]
    likeliest, least = (ours.tokenizer.decode([int(i)]) for i in (logits.argmax(), logits.argmin()))
    pairs = [(context, " " + likeliest), (context, " " + least)]
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling_log_likelihoods_are_those_of_the_harness(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, theirs = both
    texts = [(words(0, 5),), (words(0, 255),), (words(0, 256),), (words(0, 600),)]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    wanted = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts), True)
    assert found == pytest.approx(wanted, abs=1e-4, rel=1e-6)


GREEDY: dict[str, Any] = {"max_gen_toks": 12, "do_sample": False}


def test_greedy_answers_are_those_of_the_harness(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, theirs = both
    free = [(words(n, n + length), GREEDY) for n, length in ((0, 5), (7, 30), (9, 2), (0, 300))]
    wanted = theirs.generate_until(requests("generate_until", free), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", free)) == wanted
    assert len({*wanted}) > 1
    # A word of each answer, to stop at.
    stopped = [
        (context, {**GREEDY, "until": [answer.split()[3]]})
        for (context, _), answer in zip(free, wanted, strict=True)
    ]
    wanted = theirs.generate_until(requests("generate_until", stopped), disable_tqdm=True)
    found = ours.generate_until(requests("generate_until", stopped))
    assert [text.strip() for text in found] == [text.strip() for text in wanted]


def test_sampled_answers_depend_on_the_seed_alone(both: tuple[QuantkitLM, HFLM]) -> None:
    model = both[0]._model
    asked = [(words(0, 5), {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 6
    a, b, c = (
        QuantkitLM(model, batch_size=2, seed=seed).generate_until(requests("generate_until", asked))
        for seed in (1, 1, 2)
    )
    assert a == b
    assert a != c
    assert len(set(a)) == 6


def test_chat_templates_are_those_of_the_harness(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, theirs = both
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    for add in (True, False):
        assert ours.apply_chat_template(chat, add) == theirs.apply_chat_template(chat, add)
    assert ours.chat_template(True) == tiny.CHAT_TEMPLATE
    text = ours.apply_chat_template(chat)
    assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.tok_encode(text)[:2] != [tiny.BOS_ID] * 2


def test_what_a_task_may_not_ask_is_refused(both: tuple[QuantkitLM, HFLM]) -> None:
    ours, _ = both
    with pytest.raises(UnsupportedError, match="'num_beams'"):
        ours.generate_until(requests("generate_until", [("a", {"num_beams": 2})]))
    with pytest.raises(UnsupportedError, match="up to 256 new tokens"):
        ours.generate_until(requests("generate_until", [("a", {})]))
    with pytest.raises(DataError, match="likelihood of 300 tokens"):
        ours.loglikelihood(requests("loglikelihood", [("a", " " + words(0, 300))]))
