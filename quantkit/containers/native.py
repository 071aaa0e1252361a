"""Our own container: formats other than E4M3, and input channels beside the codes.

Its quant_method is ours, so that no other engine takes it for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.containers.container import Container, check_readable, mapping, names_list
from quantkit.errors import CheckpointError, RecipeError, UnsupportedError
from quantkit.numerics import FORMATS
from quantkit.scheme import PORTABLE_FORMAT, QuantSpec, Scheme


class Native(Container):
    """`quant_method: quantkit`."""

    name = "native"
    method = "quantkit"

    def to_config(self, scheme: Scheme) -> dict[str, Any]:
        """Return the block."""
        if not scheme.native:
            raise UnsupportedError(
                "the scheme is portable; write it as compressed-tensors, which quantkit reads too"
            )
        ignored = {"kv_cache_ignore": list(scheme.kv_ignore)} if scheme.kv_ignore else {}
        return {
            "quant_method": self.method,
            "weights": _with_format(scheme.weights),
            "input_activations": scheme.inputs.to_config() if scheme.inputs else None,
            "kv_cache_scheme": _with_format(scheme.kv) if scheme.kv else None,
            **ignored,
            "formats": dict(scheme.formats),
            "ignore": list(scheme.ignore),
        }

    def from_config(self, block: Mapping[str, Any]) -> Scheme:
        """Return the scheme."""
        inputs, kv = block.get("input_activations"), block.get("kv_cache_scheme")
        weights = mapping(block.get("weights"), "weights")
        formats = mapping(block.get("formats") or {}, "formats")
        try:
            scheme = Scheme(
                weights=_read_format(weights),
                inputs=QuantSpec.from_config(mapping(inputs, "inputs")) if inputs else None,
                kv=_read_format(mapping(kv, "kv_cache_scheme")) if kv else None,
                ignore=names_list(block, "ignore"),
                native=True,
                formats={name: _known_format(found) for name, found in formats.items()},
                kv_ignore=_layer_numbers(block.get("kv_cache_ignore") or []),
            )
        except RecipeError as error:
            raise CheckpointError(f"quantization_config: {error}") from None
        return check_readable(scheme)


def _with_format(spec: QuantSpec) -> dict[str, Any]:
    return {**spec.to_config(), "float_format": spec.format}


def _read_format(config: Mapping[str, Any]) -> QuantSpec:
    fmt = _known_format(config.get("float_format", PORTABLE_FORMAT))
    return replace(QuantSpec.from_config(config), format=fmt)


def _layer_numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointError(
            f"quantization_config has kv_cache_ignore {value!r:.200}; expected numbers of layers"
        )
    return tuple(value)


def _known_format(name: object) -> str:
    if not isinstance(name, str) or name not in FORMATS:
        raise RecipeError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return name
