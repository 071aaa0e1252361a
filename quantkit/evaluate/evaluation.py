"""The whole run: checkpoint, original and texts in, one Result out.

Owns the options and their checks; whatever can be refused is refused before the original is loaded
and a token is scored. Runs nothing itself: see `comparison`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.source import ModelSource, fingerprint, open_source
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import DataError, UnsupportedError, nearest
from quantkit.evaluate.comparison import score_texts
from quantkit.evaluate.distribution import Distribution
from quantkit.evaluate.models import (
    OriginalModel,
    QuantizedModel,
    check_vocabulary,
    load_original,
)
from quantkit.evaluate.result import (
    Divergence,
    Measurement,
    Perplexity,
    Result,
    Setting,
    Thresholds,
)
from quantkit.evaluate.saturation import SaturationSummary
from quantkit.evaluate.scores import TokenScores
from quantkit.evaluate.texts import Texts, load_texts
from quantkit.evaluate.windows import Cutting
from quantkit.runtime.engine import Engine
from quantkit.runtime.loading import load_engine
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.saturation import Saturation
from quantkit.scheme import Scheme
from quantkit.shards import read_json

logger = logging.getLogger("quantkit")

DEFAULT_WINDOW = 2048
ACTIVATIONS = {"emulate": "quantized", "skip": "full"}
"""What the options are called here, and in the runtime."""
KV = ("none", "fp8")
DTYPES = ("float32", "bfloat16", "float16")
"""The first is the default: quantization is then all that is measured. Computing in bfloat16 alone
moves SmolLM2-135M by a mean KL of 0.0011, where FP8 weights move it by 0.019."""


def evaluate(
    checkpoint: str | Path,
    reference: str | Path | None = None,
    *,
    data: Sequence[str] = ("builtin",),
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    activations: str = "emulate",
    kv: str | None = None,
    dtype: str = DTYPES[0],
    max_kl: float | None = None,
    max_ppl_ratio: float | None = None,
    device: str = "auto",
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Result:
    """Measure a checkpoint's perplexity on text, and its divergence from the original model.

    Args:
        checkpoint: folder that `calibrate` or `export` wrote; its tokenizer serves both models.
        reference: the original: Hugging Face folder, Hub id or .gguf file. None: perplexity alone.
        data: sources of text: builtin, FILE.txt, FILE.md, FILE.jsonl, hf:NAME[:CONFIG][:SPLIT].
        window: tokens that a model sees at once; default 2048 or the model's limit, if lower.
        stride: tokens from one window to the next; default the window, so that windows share
            nothing. Every token but the first is scored once, whatever the stride.
        max_tokens: of text to use, in all, from the beginning of each source; default all.
        activations: "emulate" quantizes the inputs of linears as the checkpoint declares, which is
            what an engine with 8-bit matmuls computes; "skip" leaves them alone.
        kv: keys and values "none" (not quantized) or "fp8"; default both, if the checkpoint has
            scales for them.
        dtype: what both models compute in besides: "float32", "bfloat16" or "float16".
        max_kl: limit of the mean KL; `Result.violations` says whether it is exceeded.
        max_ppl_ratio: limit of quantized by original perplexity, likewise.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of torch, for the whole process.
        trust_remote_code: run Python code that the reference's folder carries.
        progress: show progress on stderr.

    Raises QuantKitError if anything that was asked for cannot be measured.
    """
    thresholds = Thresholds(max_kl, max_ppl_ratio)
    if thresholds.given and reference is None:
        raise UnsupportedError(
            "--max-kl and --max-ppl-ratio compare with the original; give --reference MODEL"
        )
    check_choices(activations, kv, dtype)
    scheme = open_checkpoint(checkpoint).scheme
    source = None if reference is None else open_source(reference, trust_remote_code)
    inputs = input_activations(activations, scheme)
    counting = {
        kind: Saturation() if _is_static(scheme, kind, inputs) else None
        for kind in _kv_kinds(kv, scheme)
    }
    engines = {
        kind: load_engine(checkpoint, device, dtype, kind, inputs, threads, saturation=saturation)
        for kind, saturation in counting.items()
    }
    engine = next(iter(engines.values()))
    texts = load_texts(data, Fp8Model(engine, Path(checkpoint)).tokenizer, max_tokens)
    _check_ids(texts, engine)
    cutting = _cutting(window, stride, texts, engine)
    setting = Setting(
        checkpoint=str(checkpoint),
        reference=None if reference is None else str(reference),
        reference_is_source=_is_source(source, Path(checkpoint)),
        data=list(data),
        texts=len(texts.ids),
        skipped=dict(texts.skipped),
        tokens=texts.num_tokens,
        count=sum(cutting.count(len(ids)) for ids in texts.ids),
        window=cutting.window,
        stride=cutting.stride,
        bos="at the start of every window" if cutting.prefix else "not used by the tokenizer",
        dtype=dtype,
        activations=activations_word(activations, scheme),
    )
    _warn(setting)
    original = None if source is None else _original(source, engine)
    scores = score_texts(original, _quantized(engines), texts, cutting, progress)
    context = _context(texts, cutting)
    return _result(setting, original is not None, counting, scores, context, thresholds)


def _quantized(engines: Mapping[str, Engine]) -> list[QuantizedModel]:
    return [
        QuantizedModel(engine, f"the quantized model with kv {kv}")
        for kv, engine in engines.items()
    ]


def _result(
    setting: Setting,
    compared: bool,
    counting: Mapping[str, Saturation | None],
    scores: Sequence[TokenScores],
    context: Tensor,
    thresholds: Thresholds,
) -> Result:
    """Take averages. `scores` are those of the original, if it was `compared`, then of each kind.

    `context` says how many tokens each scored one has before it, int64 [n].
    """
    original = scores[0] if compared else None
    measurements = [
        Measurement(
            kv,
            Perplexity.of(found),
            Divergence.of(original, found) if original is not None else None,
            None if found.kl is None else Distribution.of(found.kl.numpy(), context.numpy()),
            _summary(kv, saturation),
        )
        for (kv, saturation), found in zip(counting.items(), scores[int(compared) :], strict=True)
    ]
    perplexity = Perplexity.of(original) if original is not None else None
    return Result(setting, perplexity, measurements, thresholds)


def _is_static(scheme: Scheme, kv: str, inputs: str) -> bool:
    """Return whether values meet a scale that was fixed before: inputs, or keys and values."""
    spec = scheme.inputs if inputs == "quantized" else None
    return kv != "none" or (spec is not None and not spec.dynamic)


def _summary(kv: str, saturation: Saturation | None) -> SaturationSummary | None:
    """Sum up what was counted; says so where it is much."""
    if saturation is None:
        return None
    summary = SaturationSummary(saturation.counts())
    warning = summary.warning()
    if warning is not None:
        logger.warning("kv %s: %s", kv, warning)
    return summary


def _context(texts: Texts, cutting: Cutting) -> Tensor:
    """Return how many tokens of its window stand before each scored token, int64 [n]."""
    return torch.cat(
        [
            torch.arange(window.start, len(window.inputs)) + 1
            for ids in texts.ids
            for window in cutting.windows(ids)
        ]
    )


def _original(source: ModelSource, engine: Engine) -> OriginalModel:
    """Load the original beside an engine; a vocabulary of another size is refused first."""
    check_vocabulary(source, engine.vocab_size)
    return load_original(source, engine.dtype, engine.device)


def check_choices(activations: str, kv: str | None, dtype: str) -> None:
    """Raise UnsupportedError for an option that is not one of the words it may be."""
    for option, value, known in (
        ("--activations", activations, tuple(ACTIVATIONS)),
        ("--kv", kv, (None, *KV)),
        ("--dtype", dtype, DTYPES),
    ):
        if value not in known:
            words = [word for word in known if word is not None]
            hint = nearest(str(value), words)
            raise UnsupportedError(f"{option} {value!r} is not known{hint}; use {', '.join(words)}")


def _kv_kinds(kv: str | None, scheme: Scheme) -> tuple[str, ...]:
    if kv is not None:
        return (kv,)
    return KV if scheme.kv is not None else KV[:1]


def input_activations(activations: str, scheme: Scheme) -> str:
    """Return the runtime's word for what is to be done to the inputs of linears."""
    return ACTIVATIONS[activations] if scheme.inputs else "full"


def activations_word(activations: str, scheme: Scheme) -> str:
    """Return what is done to the inputs of linears, for people."""
    if scheme.inputs is None:
        return "not quantized by this checkpoint"
    return "quantized as an 8-bit engine does" if activations == "emulate" else "left unquantized"


def _cutting(window: int | None, stride: int | None, texts: Texts, engine: Engine) -> Cutting:
    limit = engine.max_context
    if window is None:
        window = min(DEFAULT_WINDOW, limit)
    elif window > limit:
        raise DataError(f"--window is {window}, the model's context is {limit}; use at most that")
    longest = window - max(len(texts.prefix) - 1, 0)
    return Cutting(window, longest if stride is None else stride, texts.prefix)


def _check_ids(texts: Texts, engine: Engine) -> None:
    """Refuse a tokenizer that is larger than the model."""
    top = max(map(max, (texts.prefix or (0,), *texts.ids)))
    if top >= engine.vocab_size:
        raise UnsupportedError(
            f"the tokenizer gives token {top}, and the model's vocabulary has {engine.vocab_size}; "
            "the tokenizer belongs to another model"
        )


def _is_source(source: ModelSource | None, checkpoint: Path) -> bool | None:
    """Tell whether the reference is what the checkpoint was made from, if that was recorded."""
    path = checkpoint / "quantkit.json"
    if source is None or not path.is_file():
        return None
    recorded = (read_json(path).get("source") or {}).get("fingerprint")
    return None if recorded is None else bool(recorded == fingerprint(source))


def _warn(setting: Setting) -> None:
    if setting.reference_is_source is False:
        logger.warning(
            "%s is not the model that %s was made from: the divergence is not that of quantization "
            "alone",
            setting.reference,
            setting.checkpoint,
        )
    for reason, count in setting.skipped.items():
        logger.warning("%d texts left out: %s", count, reason)
