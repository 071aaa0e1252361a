"""Scales of the FP8 KV cache: keys after rotary embedding and values, exactly as cached.

They are observed where every architecture of transformers hands them over, in `Cache.update`.
The attention module that calls it owns the scales; its name is what engines look for on disk.
How a scale is chosen is in `kv_search`, what attention is measured on in `attention_probe`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.amax import AmaxObserver, canonical_kv
from quantkit.calibrate.attention_probe import AttentionProbe
from quantkit.calibrate.kv_report import KvReport, measure_kv
from quantkit.calibrate.kv_search import KvError, choose_scales, plain_scales
from quantkit.calibrate.ranks import Ranks
from quantkit.errors import CalibrationError
from quantkit.numerics import amax_to_scale
from quantkit.scheme import Granularity, QuantSpec


class KvObserver:
    """Observes the keys and values of one decoder layer, and who caches them.

    Use as the receiver of `observing_cache`, between `attach` and `detach` on the layer. Runs of
    several batches may be under way at once; `begin` tells whose goes on. `scales` needs the
    layer's weights to be loaded still; `report` is known after it.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self.per_head = spec.granularity is Granularity.HEAD
        self._fmt = spec.fmt
        self.keys, self.values = AmaxObserver(), AmaxObserver()
        self.owner: str | None = None
        self.report: KvReport | None = None
        self._probe = AttentionProbe()
        self._running: list[str] = []  # submodules, of the run that goes on
        self._under_way: dict[int, list[str]] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self, layer: nn.Module) -> None:
        """Follow which submodule of the layer is running."""
        self._probe.install()
        for name, module in layer.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def begin(self, first: int) -> None:
        """Announce the run of the batch whose first sequence has number `first`."""
        self._running = self._under_way.setdefault(first, [])

    def detach(self) -> None:
        """Remove every hook."""
        self._probe.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Take in what is about to be cached. Shapes: [batch, kv_heads, tokens, head_dim]."""
        self.owner = self._running[-1] if self._running else None
        self._probe.offer(keys, values)
        self.keys.update(canonical_kv(keys, self.per_head))
        self.values.update(canonical_kv(values, self.per_head))

    def merge(self, ranks: Ranks) -> None:
        """Take in what the other processes have seen, in the first; samples are its own."""
        for keys, values in ranks.gather((self.keys.take(), self.values.take())):
            self.keys.merge_observer(keys)
            self.values.merge_observer(values)

    def scales(self, layer_name: str) -> dict[str, Tensor]:
        """Return {tensor name: scale}: float32 [1], or [kv_heads, 1, 1] with one a head.

        Raises CalibrationError naming the layer if nothing was ever cached, or not finite.
        """
        if self.owner is None or self.keys.amax is None or self.values.amax is None:
            raise CalibrationError(
                f"{layer_name} cached no keys or values, so its KV scales are unknown; use --kv "
                "none for this model"
            )
        base = f"{layer_name}.{self.owner}" if self.owner else layer_name
        if not all(amax.isfinite().all() for amax in (self.keys.amax, self.values.amax)):
            raise CalibrationError(f"{base} produced keys or values that are not finite")
        amaxes = self._choose(self.keys.amax.cpu(), self.values.amax.cpu())
        scales = {}
        for name, amax in zip(("k_scale", "v_scale"), amaxes, strict=True):
            scale = amax_to_scale(amax, self._fmt)
            scales[f"{base}.{name}"] = scale.reshape(-1, 1, 1) if self.per_head else scale
        return scales

    @torch.no_grad()
    def _choose(self, key_amax: Tensor, value_amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amaxes that the scales stand for, and make the report."""
        self._probe.flush()
        measure = KvError(self._probe.samples, self.per_head, self._fmt)
        # On a few short sequences chance would choose; they get what everyone expects.
        choose = choose_scales if self._probe.full else plain_scales
        choice = choose(measure, key_amax, value_amax)
        self.report = measure_kv(measure, choice)
        self._probe = AttentionProbe()  # its samples hold on to the layer
        return choice.key_amax, choice.value_amax

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._running.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if not self._running:
            self._probe.flush()


def observing_cache(config: Any) -> Any:
    """Return a transformers cache that keeps no keys and shows all to its `observer`, if any.

    What comes in goes out unchanged, so attention sees exactly this batch. The states of recurrent
    layers are kept, as those layers need them within a run; `forget` drops them.
    """
    from transformers import DynamicCache

    class ObservingCache(DynamicCache):  # type: ignore[misc]
        observer: KvObserver | None = None

        def forget(self) -> None:
            self.layers = DynamicCache(config=config).layers

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if self.observer is not None:
                self.observer.update(key_states, value_states)
            return key_states, value_states

    return ObservingCache(config=config)
