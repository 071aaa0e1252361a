"""Any model that the decoder does not know: transformers runs it, with our linears inside.

Correct before fast: sequences run one by one, so that none depends on its neighbours, and the
cache holds plain values; an 8-bit cache is emulated by rounding what goes in. Imported only when
needed, because it imports transformers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantkit.checkpoint import QuantizedWeight, cached_layers
from quantkit.errors import CheckpointError, GenerationError, UnsupportedError, first_line
from quantkit.experts import FUSED, find_fused, split_experts
from quantkit.linears import check_model_type, is_linear
from quantkit.model_names import is_converted, names_in_model
from quantkit.numerics import E4M3, Format, decode, encode
from quantkit.runtime.decoder import check_context
from quantkit.runtime.engine import SequenceCache
from quantkit.runtime.kv_cache import Scales
from quantkit.runtime.layers import Linear
from quantkit.runtime.module_places import ModulePlaces
from quantkit.runtime.placement import DeviceMap
from quantkit.runtime.saturation import Saturation, keys_of, values_of
from quantkit.runtime.weights import WeightReader

UNLIMITED = 2**31 - 1
"""Context length of models without position limit (relative or no positions)."""


class SwappedLinear(nn.Module):
    """Stands where transformers had an nn.Linear. Shapes: [..., in_features] in, any rank.

    `stored` is what `linear` was made of.
    """

    def __init__(
        self, linear: Linear, stored: QuantizedWeight, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = stored.codes.shape
        self._stored = stored
        self._dtype = dtype
        self._device = device

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for models that multiply by it themselves, as Mamba does."""
        return self._stored.dequantize(self._dtype).to(self._device)

    @property
    def bias(self) -> Tensor | None:
        """The bias, for the same models."""
        bias = self._stored.bias
        return None if bias is None else bias.to(self._device, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of x's rank."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.linear(rows).view(*x.shape[:-1], self.out_features)


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """A transformers cache that keeps every token, and rounds what it stores to 8 bits.

    `scales` maps the number of a layer to its k_scale and v_scale; other layers are not rounded.
    What the scales cannot hold is counted in `saturation`.
    """

    def __init__(
        self,
        config: Any,
        scales: dict[int, Scales],
        fmt: Format = E4M3,
        saturation: Saturation | None = None,
    ) -> None:
        super().__init__(config=config)
        self.scales = scales
        self.fmt = fmt
        self.saturation = saturation
        # A sliding layer drops old tokens and could not be rolled back. The mask hides them too.
        self.layers: list[Any] = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in self.layers
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer. Shapes: [1, num_kv_heads, num_tokens, head_dim]."""
        if layer_idx in self.scales:
            k_scale, v_scale = self.scales[layer_idx]
            if self.saturation is not None:
                for name, states, scale in (
                    (keys_of(layer_idx), key_states, k_scale),
                    (values_of(layer_idx), value_states, v_scale),
                ):
                    self.saturation.count(name, states, (scale * self.fmt.max).view(-1, 1, 1))
            key_states, value_states = (
                _rounded(key_states, k_scale, self.fmt),
                _rounded(value_states, v_scale, self.fmt),
            )
        stored: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return stored

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every layer."""
        for number, layer in enumerate(self.layers):
            if type(layer) is not DynamicLayer:
                raise UnsupportedError(
                    f"layer {number} keeps a state ({type(layer).__name__}) that cannot be rolled "
                    "back; generate without a draft"
                )
            if layer.is_initialized:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]


class SequentialCache:
    """One transformers cache per sequence; implements SequenceCache."""

    def __init__(self, num_sequences: int, new: Callable[[], RoundingCache]) -> None:
        self._new = new
        self._lengths = [0] * num_sequences
        self._caches = [new() for _ in range(num_sequences)]

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per sequence."""
        return list(self._lengths)

    def __getitem__(self, sequence: int) -> RoundingCache:
        return self._caches[sequence]

    def advance(self, sequence: int, num_tokens: int) -> None:
        """Count tokens that the model has stored."""
        self._lengths[sequence] += num_tokens

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every token of `sequence` from position `length` on."""
        stored = self._lengths[sequence]
        if not 0 <= length <= stored:
            raise GenerationError(
                f"sequence {sequence} holds {stored} tokens and cannot be truncated to {length}"
            )
        if length == 0:
            self.release(sequence)
        elif length < stored:
            self._caches[sequence].truncate(length)
            self._lengths[sequence] = length

    def release(self, sequence: int) -> None:
        """Forget `sequence`; it may be used again."""
        self._caches[sequence] = self._new()
        self._lengths[sequence] = 0


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


def load_model(reader: WeightReader, config: Any, device_map: str | DeviceMap | None = None) -> Any:
    """Return the transformers model of a checkpoint, its quantized linears swapped for ours.

    `device_map` spreads it over GPUs, with accelerate; see `quantkit.load_fp8`. Raises
    UnsupportedError if a quantized module is no nn.Linear there, and CheckpointError, with its
    name, if a tensor is missing.
    """
    model = _empty_model(config, reader.dtype)
    _split_experts(model, reader.checkpoint.names)
    names = names_in_model(model, reader.checkpoint.names)
    placed = ModulePlaces.of(model, device_map, reader, names)
    for module in reader.checkpoint.quantized:
        weight_name = names.get(f"{module}.weight")
        _swap(model, weight_name, module, reader, placed)
        # A head that is quantized is tied to its embedding no longer.
        model.all_tied_weights_keys.pop(weight_name, None)
    # A swapped linear has no tensors of its own left, so what remains is what was not quantized.
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = {
        inner: reader.on(placed.device_of(inner)).tensor(outer, shapes[inner])
        for outer, inner in names.items()
        if inner in shapes
    }
    model.load_state_dict(plain, strict=False, assign=True)
    model.tie_weights(recompute_mapping=False)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing and is_converted(model, missing[0]):
        raise UnsupportedError(
            f"{type(model).__name__} makes {missing[0]} of tensors that the checkpoint holds "
            "otherwise, as transformers does on loading; quantkit cannot run it, transformers can"
        )
    if missing:
        raise CheckpointError(
            f"{reader.checkpoint.path} lacks {len(missing)} tensors of {type(model).__name__}, the "
            f"first being {missing[0]}"
        )
    _report_unused(model, reader.unused())
    return placed.dispatch(model).eval()


def _numbers_tokens(model: Any) -> bool:
    """Tell whether positions begin beyond the number of the padding token, as in RoBERTa."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())


def _report_unused(model: Any, names: Sequence[str]) -> None:
    if names:
        logging.getLogger("quantkit").warning(
            "%s does not use %d tensors of the checkpoint, the first being %s",
            type(model).__name__,
            len(names),
            names[0],
        )


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Build the model without memory for its weights; computed buffers are real."""
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # a class that its config does not fit raises of every kind
        raise UnsupportedError(
            f"transformers has no causal language model for {config.model_type!r} with this "
            f"config.json: {first_line(error)}"
        ) from error


def _split_experts(model: Any, names: Sequence[str]) -> None:
    """Give each expert linears of its own, but where the checkpoint has all of a layer in one."""
    stored = set(names_in_model(model, names).values())
    fused = [e for e in find_fused(model) if f"{e.name}.{FUSED[0]}" not in stored]
    split_experts(model, fused)


def _swap(
    model: Any,
    weight_name: str | None,
    module: str,
    reader: WeightReader,
    placed: ModulePlaces,
) -> None:
    target = (weight_name or module).removesuffix(".weight")
    old = model.get_submodule(target) if weight_name else None
    if old is None or not is_linear(old):
        kind = "missing" if old is None else f"a {type(old).__name__}"
        raise UnsupportedError(
            f"{module} is quantized and is {kind} in {type(model).__name__} of transformers; "
            "only linear layers can be served"
        )
    size = (old.out_features, old.in_features)
    source = reader.on(placed.device_of(target))
    linear = source.linear([module], [size[0]], size[1], bias=old.bias is not None)
    stored = reader.checkpoint.weight(module)
    model.set_submodule(target, SwappedLinear(linear, stored, reader.dtype, source.device))


def _rounded(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Quantize and dequantize. Shapes: x [1, heads, tokens, head_dim], scale [1] or [heads]."""
    if scale.numel() not in (1, x.shape[1]):
        raise CheckpointError(
            f"a KV scale has {scale.numel()} elements, expected 1 or {x.shape[1]} (KV heads)"
        )
    per_head = scale.to(x.device).view(-1, 1, 1)
    return (decode(encode(x.float() / per_head, fmt), fmt) * per_head).to(x.dtype)
