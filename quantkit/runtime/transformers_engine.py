"""Any model that the decoder does not know: transformers runs it, with our linears inside.

Correct before fast: sequences run one by one, so that none depends on its neighbours. The model is
built in `transformers_model`, what it caches is in `transformers_cache`. Imported only when needed,
because those import transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint import cached_layers
from quantkit.errors import GenerationError
from quantkit.linears import check_model_type
from quantkit.numerics import E4M3
from quantkit.runtime.engine import SequenceCache, check_context
from quantkit.runtime.kv_cache import Scales
from quantkit.runtime.placement import DeviceMap
from quantkit.runtime.transformers_cache import RoundingCache, SequentialCache
from quantkit.runtime.transformers_model import load_model
from quantkit.runtime.weights import WeightReader

UNLIMITED = 2**31 - 1
"""Context length of models without position limit (relative or no positions)."""


class TransformersEngine:
    """A transformers model with quantized linears; implements Engine."""

    def __init__(
        self,
        reader: WeightReader,
        config: Any,
        quantize_kv: bool,
        device_map: str | DeviceMap | None = None,
    ) -> None:
        text_config = config.get_text_config(decoder=True)
        check_model_type(config.model_type)
        self.vocab_size = int(text_config.vocab_size)
        self.max_context = int(getattr(text_config, "max_position_embeddings", None) or UNLIMITED)
        self.device = reader.device
        self.dtype = reader.dtype
        self._config = config
        self._saturation = reader.saturation
        self._scales: dict[int, Scales] = {}
        kv = reader.checkpoint.scheme.kv
        self._kv_format = E4M3 if kv is None else kv.fmt
        if quantize_kv:
            pairs = ((n, reader.kv_scales(n)) for n in cached_layers(reader.checkpoint.config))
            self._scales = {number: pair for number, pair in pairs if pair is not None}
        self._model = load_model(reader, config, device_map)
        parameters = inspect.signature(self._model.forward).parameters
        self._keeps_last = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters and not _numbers_tokens(self._model)
        # Renamed in the course of transformers 5.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def new_cache(self, num_sequences: int, max_tokens: int) -> SequentialCache:
        """Return an empty cache; it grows as needed."""
        new = partial(RoundingCache, self._config, self._scales, self._kv_format, self._saturation)
        return SequentialCache(num_sequences, new)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
        last_only: bool = True,
    ) -> Tensor:
        """Append tokens to the cache and return the logits that follow them; see Engine."""
        if not isinstance(cache, SequentialCache):
            raise GenerationError("the cache belongs to another model; call new_cache of this one")
        check_context(sequences, num_new_tokens, cache.lengths, self.max_context)
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
        parts = []
        chunks = torch.split(input_ids.to(self.device), list(num_new_tokens))
        for sequence, ids in zip(sequences, chunks, strict=True):
            options[self._cache_argument] = cache[sequence]
            if self._takes_positions:  # Bamba would count from 0 in every pass
                start = cache.lengths[sequence]
                positions = torch.arange(start, start + len(ids), device=self.device)
                options["position_ids"] = positions.unsqueeze(0)
            logits = self._model(ids.unsqueeze(0), use_cache=True, **options).logits[0]
            cache.advance(sequence, len(ids))
            parts.append(logits[-1:] if last_only else logits)
        return torch.cat(parts).float()

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, without a cache; see Engine."""
        rows = torch.split(input_ids.to(self.device), 1)
        return torch.cat([self._model(row, use_cache=False).logits for row in rows]).float()


def _numbers_tokens(model: Any) -> bool:
    """Tell whether positions begin beyond the number of the padding token, as in RoBERTa."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
