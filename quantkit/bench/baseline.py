"""The original model in transformers, in bfloat16, as something to compare a checkpoint with."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

from quantkit.bench.speed import Times, Workload
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import open_source
from quantkit.errors import SourceError


class TransformersRunner:
    """Decodes greedily with transformers' own cache, calling the model directly: no generate()."""

    name = "transformers bf16"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab_size = int(model.get_output_embeddings().weight.shape[0])
        parameters = inspect.signature(model.forward).parameters
        self._prefill_options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # Renamed in the course of transformers 5.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(cls, reference: str) -> TransformersRunner:
        """Load the original from a folder, Hub id or .gguf file; raises SourceError."""
        source = open_source(reference)
        skeleton = Skeleton(source, source.config(), torch.bfloat16, torch.device("cpu"))
        for prefix in ("", *skeleton.layer_names):
            skeleton.load(prefix)
        model = skeleton.model
        model.tie_weights()
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if missing:
            raise SourceError(f"{source.name} has no tensor {missing[0]}")
        return cls(model.eval())

    @torch.inference_mode()
    def run(self, workload: Workload) -> Times:
        """Run the workload once, all prompts of the batch together."""
        ids = torch.tensor(workload.prompts(self._vocab_size))
        begin = time.perf_counter()
        output = self._model(ids, use_cache=True, **self._prefill_options)
        tokens = output.logits[:, -1:].argmax(dim=-1)
        middle = time.perf_counter()
        for _ in range(workload.new_tokens - 1):
            cache = {self._cache_argument: output.past_key_values}
            output = self._model(tokens, use_cache=True, **cache)
            tokens = output.logits[:, -1:].argmax(dim=-1)
        return Times(middle - begin, time.perf_counter() - middle)
