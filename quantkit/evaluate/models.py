"""The two sides of an evaluation behind one interface: logits of a window, a few rows at a time.

The quantized side is the runtime's engine; the original runs in transformers with the weights that
calibration would read. Both read a window through a key/value cache when its logits are too many
to hold at once. Nothing here computes a score.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import ModelSource
from quantkit.errors import CheckpointError, SourceError, UnsupportedError
from quantkit.evaluate.windows import Window
from quantkit.runtime.engine import Engine

CHUNK_BYTES = 1 << 26
"""Most bytes of float32 logits that one model hands out at once."""


class LogitSource(Protocol):
    """A model to be scored."""

    label: str  # for messages

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    def logits(self, window: Window, rows: int) -> Iterator[Tensor]:
        """Yield the logits of the scored rows of a window, in order, at most `rows` at a time.

        Shapes: float32 [<= rows, vocab] each, finite.
        """
        ...


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows of logits fit into CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


class QuantizedModel:
    """A checkpoint in the runtime; its cache holds keys and values as the engine was loaded."""

    def __init__(self, engine: Engine, label: str) -> None:
        self.label = label
        self._engine = engine
        self._cache = engine.new_cache(1, 0)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._engine.vocab_size

    def logits(self, window: Window, rows: int) -> Iterator[Tensor]:
        """Yield the logits of the scored rows; see LogitSource."""
        context, scored = window.inputs[: window.start], window.inputs[window.start :]
        position = window.position
        try:
            if len(context):
                self._forward(context, last_only=True)
            for part in torch.split(scored, rows):
                logits = self._forward(part, last_only=False)
                if (bad := _first_not_finite(logits)) is not None:
                    raise CheckpointError(_not_finite(self.label, position + bad, window.text))
                yield logits
                position += len(part)
        finally:
            self._cache.release(0)

    def _forward(self, ids: Tensor, last_only: bool) -> Tensor:
        return self._engine.forward(ids, [0], [len(ids)], self._cache, last_only=last_only)


class OriginalModel:
    """The model before quantization, run by transformers in one dtype."""

    label = "the original"

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        parameters = inspect.signature(model.forward).parameters
        self._keeps_last = "logits_to_keep" in parameters
        # Renamed in the course of transformers 5.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def logits(self, window: Window, rows: int) -> Iterator[Tensor]:
        """Yield the logits of the scored rows; see LogitSource."""
        count = len(window.targets)
        if count <= rows:
            parts = iter([self._forward(window.inputs, count, use_cache=False)])
        else:
            parts = self._cached(window, rows)
        position = window.position
        for logits in parts:
            if (bad := _first_not_finite(logits)) is not None:
                raise SourceError(_not_finite(self.label, position + bad, window.text))
            yield logits
            position += len(logits)

    def _cached(self, window: Window, rows: int) -> Iterator[Tensor]:
        from transformers import DynamicCache

        options = {
            self._cache_argument: DynamicCache(config=self._model.config),
            "use_cache": True,
        }
        if window.start:
            self._forward(window.inputs[: window.start], 1, **options)
        for part in torch.split(window.inputs[window.start :], rows):
            yield self._forward(part, len(part), **options)

    def _forward(self, ids: Tensor, keep: int, **options: Any) -> Tensor:
        """Return float32 logits of the last `keep` rows. Shapes: int64 [n] -> [keep, vocab]."""
        if self._keeps_last:
            options["logits_to_keep"] = keep
        output = self._model(ids.unsqueeze(0).to(self._device), **options)
        logits: Tensor = output.logits[0, -keep:]
        return logits.float()


def load_original(source: ModelSource, dtype: torch.dtype, device: torch.device) -> OriginalModel:
    """Load the whole original, computing in `dtype`; raises SourceError if a tensor is missing."""
    return OriginalModel(load_in_transformers(source, dtype, device), device)


def load_in_transformers(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the transformers model with the weights that calibration reads; see load_original."""
    skeleton = Skeleton(source, source.config(), dtype, device)
    for prefix in ("", *skeleton.layer_names):
        skeleton.load(prefix)
    model = skeleton.model.to(device)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise SourceError(f"{source.name} has no tensor {missing[0]} ({len(missing)} missing)")
    return model.eval()


def check_vocabulary(source: ModelSource, vocab_size: int) -> None:
    """Refuse an original whose vocabulary is not the checkpoint's."""
    found = int(source.config().get_text_config().vocab_size)
    if found != vocab_size:
        raise UnsupportedError(
            f"{source.name} has a vocabulary of {found} tokens and the checkpoint one of "
            f"{vocab_size}; give the model that the checkpoint was made from"
        )


def _first_not_finite(logits: Tensor) -> int | None:
    """Return the first row with NaN or infinity. Shapes: [n, vocab]."""
    low, high = torch.aminmax(logits, dim=-1)  # NaN and infinity both reach one of the two
    bad = ~(low.isfinite() & high.isfinite())
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def _not_finite(label: str, position: int, text: int) -> str:
    return (
        f"the logits of {label} are not finite (NaN or infinity), first where token {position} of "
        f"text {text} is to be predicted; the model is damaged, or this dtype too narrow"
    )
