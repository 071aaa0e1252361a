from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quantkit.calibrate import calibrate
from quantkit.errors import DataError, QuantKitError, SourceError, UnsupportedError
from quantkit.evaluate import Result, evaluate
from quantkit.evaluate import models as evaluate_models
from quantkit.runtime.loading import load_engine
from tests import checkpoints, reference, tiny
from tests.evaluate.conftest import CONFIG

BOS = (tiny.BOS_ID,)
TEXT = [len(tiny.SPECIAL_TOKENS) + tiny.WORDS.index(word) for word in tiny.sentence(101).split()]


def run(folder: Path, text_file: Path, **options: Any) -> Result:
    options = {"data": [str(text_file)], "progress": False, **options}
    return evaluate(folder / "fp8", **options)


def from_model(model: Any) -> Callable[[list[int]], reference.Float64]:
    def next_logits(context: list[int]) -> reference.Float64:
        with torch.no_grad():
            output = model(torch.tensor([context]))
        return np.asarray(getattr(output, "logits", output)[0, -1].double().numpy())

    return next_logits


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("stride", [8, 16, 31, 32])
def test_b43_perplexity_is_that_of_the_definition(
    stride: int, bos: bool, quantized: Path, text_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(quantized / "fp8", tmp_path / "fp8")
    tiny.save_tokenizer(tmp_path / "fp8", add_bos=bos)
    result = run(tmp_path, text_file, window=32, stride=stride, activations="skip", kv="none")
    model = from_model(checkpoints.reference_model(quantized / "fp8"))
    scored = reference.scored_log_probabilities(model, TEXT, 32, stride, BOS if bos else ())
    (found,) = result.measurements
    assert result.setting.count == len(scored) == (101 if bos else 100)
    assert found.perplexity.perplexity == pytest.approx(
        reference.perplexity(scored, TEXT), rel=1e-6
    )
    assert (result.original, found.divergence) == (None, None)


@pytest.mark.parametrize("activations", ["emulate", "skip"])
def test_divergence_is_that_of_the_definition(
    activations: str, quantized: Path, text_file: Path
) -> None:
    options = {"window": 24, "stride": 10, "activations": activations, "max_tokens": 50}
    result = run(quantized, text_file, reference=quantized / "source", **options)
    original = from_model(AutoModelForCausalLM.from_pretrained(quantized / "source").eval())
    text = TEXT[:50]
    p = reference.scored_log_probabilities(original, text, 24, 10, BOS)
    assert result.original is not None
    assert result.original.perplexity == pytest.approx(reference.perplexity(p, text), rel=1e-6)
    assert [found.kv for found in result.measurements] == ["none", "fp8"]
    for found in result.measurements:
        engine = load_engine(
            quantized / "fp8",
            dtype="float32",
            kv=found.kv,
            activations="quantized" if activations == "emulate" else "full",
        )

        def through_cache(ids: torch.Tensor, engine: Any = engine) -> torch.Tensor:
            logits: torch.Tensor = engine.forward(
                ids[0], [0], [ids.shape[1]], engine.new_cache(1, 64)
            )
            return logits.unsqueeze(0)

        q = reference.scored_log_probabilities(from_model(through_cache), text, 24, 10, BOS)
        kl = reference.divergences(p, q)
        assert found.divergence is not None
        assert found.divergence.mean_kl == pytest.approx(kl.mean(), rel=2e-3)
        assert found.divergence.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=2e-3)
        same = [a.argmax() == b.argmax() for a, b in zip(p.values(), q.values(), strict=True)]
        assert found.divergence.top1_agreement == pytest.approx(np.mean(same))
        ratio = reference.perplexity(q, text) / reference.perplexity(p, text)
        assert found.divergence.ppl_ratio == pytest.approx(ratio, rel=1e-4)
    plain, rounded = (found.divergence for found in result.measurements)
    assert plain is not None
    assert rounded is not None
    assert plain.mean_kl < rounded.mean_kl


def test_only_quantization_makes_a_difference(
    quantized: Path, text_file: Path, tmp_path: Path
) -> None:
    checkpoints.reference_model(quantized / "fp8").save_pretrained(tmp_path)
    options = {"activations": "skip", "kv": "none"}
    (found,) = run(quantized, text_file, reference=tmp_path, **options).measurements
    assert found.divergence is not None
    assert 0 <= found.divergence.mean_kl < 1e-9
    assert found.divergence.top1_agreement == 1.0
    assert found.divergence.ppl_ratio == pytest.approx(1.0, abs=1e-6)


def test_chunks_change_nothing(
    quantized: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"reference": quantized / "source", "window": 48, "stride": 20}
    whole = run(quantized, text_file, **options).to_json()["measurements"]
    monkeypatch.setattr(evaluate_models, "CHUNK_BYTES", 4 * tiny.VOCAB_SIZE * 5)
    parts = run(quantized, text_file, **options).to_json()["measurements"]
    for kv, numbers in whole.items():
        assert parts[kv] == pytest.approx(numbers, rel=2e-2), kv


def test_documents_are_scored_on_their_own(quantized: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "r.jsonl", [{"text": tiny.sentence(9)}] * 3)
    one = tiny.write_jsonl(tmp_path / "one.jsonl", [{"text": tiny.sentence(9)}])
    three, single = (run(quantized, path, kv="none") for path in (rows, one))
    assert (three.setting.texts, three.setting.count) == (3, 27)
    assert three.measurements[0].perplexity.perplexity == pytest.approx(
        single.measurements[0].perplexity.perplexity, rel=1e-6
    )


def test_the_setting_says_how_it_was_measured(quantized: Path, text_file: Path) -> None:
    setting = run(quantized, text_file, max_tokens=50, kv="none").setting
    assert str(setting) == (
        "50 of 50 tokens scored, 1 text; window 256, stride 256; BOS at the start of every window; "
        "computed in float32; activations quantized as an 8-bit engine does"
    )


def test_a_reference_that_is_not_the_source_is_reported(
    tiny_llama: Path, tiny_llama_tied: Path, text_file: Path, tmp_path: Path
) -> None:
    calibrate(tiny_llama, tmp_path / "fp8", samples=4, seq_len=16, progress=False)
    options = {"max_tokens": 20, "kv": "none"}
    known = run(tmp_path, text_file, reference=tiny_llama, **options)
    other = run(tmp_path, text_file, reference=tiny_llama_tied, **options)
    assert known.setting.reference_is_source is True
    assert other.setting.reference_is_source is False


def test_a_weights_only_checkpoint_has_no_activations_to_quantize(
    tmp_path: Path, text_file: Path
) -> None:
    from quantkit.scheme import Granularity, QuantSpec, Scheme

    scheme = Scheme(QuantSpec(Granularity.CHANNEL))
    checkpoints.build(tmp_path, LlamaConfig(**CONFIG), scheme)
    tiny.save_tokenizer(tmp_path / "fp8")
    result = run(tmp_path, text_file)
    assert result.setting.activations == "not quantized by this checkpoint"
    assert [found.kv for found in result.measurements] == ["none"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"stride": 300, "window": 100},
            DataError,
            "--stride must be between 1 and the window, 100",
        ),
        ({"stride": 0}, DataError, "--stride must be .* got 0"),
        ({"window": 257}, DataError, "--window is 257, the model's context is 256"),
        ({"window": 0}, DataError, "--window must be at least 1"),
        ({"max_tokens": 1}, DataError, "--max-tokens is 1"),
        ({"data": []}, DataError, "no data is given"),
        ({"max_kl": 0.1}, UnsupportedError, "give --reference"),
        ({"max_ppl_ratio": 1.0}, UnsupportedError, "give --reference"),
        ({"activations": "emulated"}, UnsupportedError, "did you mean 'emulate'"),
        ({"kv": "fp4"}, UnsupportedError, "--kv 'fp4' is not known"),
        ({"dtype": "fp32"}, UnsupportedError, "--dtype 'fp32' is not known"),
        ({"reference": "absent/model.gguf"}, SourceError, "absent/model.gguf"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: dict[str, Any],
    error: type[QuantKitError],
    message: str,
    quantized: Path,
    text_file: Path,
) -> None:
    with pytest.raises(error, match=message):
        run(quantized, text_file, **options)


def test_another_vocabulary_is_refused(quantized: Path, text_file: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path, LlamaConfig(**{**CONFIG, "vocab_size": 130}))
    with pytest.raises(UnsupportedError, match=r"has a vocabulary of 130 .* one of 128"):
        run(quantized, text_file, reference=other)


def test_a_tokenizer_larger_than_the_model_is_refused(text_file: Path, tmp_path: Path) -> None:
    checkpoints.build(tmp_path, LlamaConfig(**{**CONFIG, "vocab_size": 64}))
    tiny.save_tokenizer(tmp_path / "fp8")
    with pytest.raises(UnsupportedError, match="the model's vocabulary has 64"):
        run(tmp_path, text_file)


def test_a_checkpoint_without_kv_scales_has_no_fp8_cache(tmp_path: Path, text_file: Path) -> None:
    checkpoints.build(tmp_path, LlamaConfig(**CONFIG))
    tiny.save_tokenizer(tmp_path / "fp8")
    with pytest.raises(QuantKitError, match="no KV scales"):
        run(tmp_path, text_file, kv="fp8")


def test_progress_is_bounded(
    quantized: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(quantized, text_file, window=2, stride=1, kv="none", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 34  # 100 windows, three at a time
    assert lines[-1].startswith("evaluate 34/34")
    assert "perplexity" in lines[-1]
