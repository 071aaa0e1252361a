"""Scales of the FP8 KV cache: keys after rotary embedding and values, exactly as cached.

They are observed where every architecture of transformers hands them over, in `Cache.update`.
The attention module that calls it owns the scales; its name is what engines look for on disk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.observers import AmaxObserver, canonical_kv
from quantkit.errors import CalibrationError
from quantkit.numerics import E4M3, amax_to_scale
from quantkit.scheme import Granularity, QuantSpec


class KvObserver:
    """Observes the keys and values of one decoder layer, and who caches them.

    Use as the receiver of `observing_cache`, between `attach` and `detach` on the layer.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self.per_head = spec.granularity is Granularity.HEAD
        self.keys, self.values = AmaxObserver(), AmaxObserver()
        self.owner: str | None = None
        self._running: list[str] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, layer: nn.Module) -> None:
        """Follow which submodule of the layer is running."""
        for name, module in layer.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Take in what is about to be cached. Shapes: [batch, kv_heads, tokens, head_dim]."""
        self.owner = self._running[-1] if self._running else None
        self.keys.update(canonical_kv(keys, self.per_head))
        self.values.update(canonical_kv(values, self.per_head))

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
        scales = {}
        for name, amax in (("k_scale", self.keys.amax), ("v_scale", self.values.amax)):
            if not amax.isfinite().all():
                raise CalibrationError(f"{base} produced keys or values that are not finite")
            scale = amax_to_scale(amax.cpu(), E4M3)
            scales[f"{base}.{name}"] = scale.reshape(-1, 1, 1) if self.per_head else scale
        return scales

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._running.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


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
