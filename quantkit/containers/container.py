"""What a container is: how one format spells a Scheme in config.json, and names its tensors.

Stored and own scales differ in names and shapes only: the numbers are float32 multipliers in the
same order, so a reshape converts between them in both directions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.errors import CheckpointError
from quantkit.scheme import Granularity, QuantSpec, Scheme

Shape = tuple[int, ...]
SCALAR: tuple[Shape, ...] = ((1,), ())
"""Shapes of a single scale, ours first."""

WEIGHT_KINDS = (Granularity.TENSOR, Granularity.CHANNEL, Granularity.GROUP, Granularity.BLOCK)
INPUT_KINDS = (
    (Granularity.TENSOR, False),
    (Granularity.TENSOR, True),
    (Granularity.TOKEN, True),
    (Granularity.GROUP, True),
)
KV_KINDS = (Granularity.TENSOR, Granularity.HEAD)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of scales, as alternatives: the first is written, all are read.

    `weight_scale` and `input_scale` follow the name of a linear module, `k_scale` and `v_scale`
    that of an attention module. `kv_scale`, of old, is one number for both.
    """

    weight_scale: tuple[str, ...] = ("weight_scale",)
    input_scale: tuple[str, ...] = ("input_scale",)
    k_scale: tuple[str, ...] = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
    v_scale: tuple[str, ...] = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


class Container(ABC):
    """One format of quantized checkpoints, as a writer and a reader need it."""

    name: ClassVar[str]
    """What `quantkit export --format` calls it."""
    method: ClassVar[str]
    """The quant_method of its `quantization_config`."""
    names: ClassVar[Names] = Names()
    kv_scales_default_to_1: ClassVar[bool] = False
    """Whether a declared FP8 KV cache without any scale in the file has scales of 1."""

    @abstractmethod
    def to_config(self, scheme: Scheme) -> dict[str, Any]:
        """Return the `quantization_config` block of config.json.

        Raises UnsupportedError for a scheme that the container cannot say.
        """

    def side_files(self, scheme: Scheme) -> dict[str, dict[str, Any]]:
        """Return the JSON files that belong beside config.json, by name.

        Raises UnsupportedError for a scheme that the container cannot say.
        """
        return {}

    @abstractmethod
    def from_config(self, block: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a `quantization_config` block.

        Raises CheckpointError for what is not a quantization to 8-bit floats that quantkit reads.
        """

    def weight_scale_shapes(self, spec: QuantSpec, rows: int, columns: int) -> tuple[Shape, ...]:
        """Return the shapes of the stored scale of a (rows, columns) weight: written first."""
        own = spec.scale_shape(rows, columns)
        return SCALAR if spec.granularity is Granularity.TENSOR else (own,)

    def input_scale_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the stored scale of a static input: written first."""
        return SCALAR

    def kv_scale_shapes(self, spec: QuantSpec, heads: int) -> tuple[Shape, ...]:
        """Return the shapes of the stored scale of keys or values: written first."""
        return ((heads, 1, 1), (heads,)) if spec.granularity is Granularity.HEAD else SCALAR


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object; raises CheckpointError that names it if not."""
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"quantization_config has {what}={value!r}, expected a JSON object; restore config.json"
        )
    return value


def names_list(block: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the module names that a block lists under any of `keys`, each once, in order."""
    found: dict[str, None] = {}
    for key in keys:
        value = block.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(
                f"quantization_config has {key}={value!r}, expected a list of module names"
            )
        found |= dict.fromkeys(value)
    return tuple(found)


def check_readable(scheme: Scheme) -> Scheme:
    """Return the scheme; raises CheckpointError if it is none that quantkit can compute with."""
    weights, inputs, kv = scheme.weights, scheme.inputs, scheme.kv
    if weights.granularity not in WEIGHT_KINDS or weights.dynamic:
        raise _unreadable("weights", weights, "static scales per tensor, channel, group or block")
    if inputs is not None and (inputs.granularity, inputs.dynamic) not in INPUT_KINDS:
        raise _unreadable(
            "input_activations", inputs, "a static scale, or dynamic ones per tensor, token, group"
        )
    if kv is not None and (kv.granularity not in KV_KINDS or kv.dynamic):
        raise _unreadable("kv_cache_scheme", kv, "static scales, one per layer or per head")
    return scheme


def _unreadable(part: str, spec: QuantSpec, known: str) -> CheckpointError:
    kind = "dynamic" if spec.dynamic else "static"
    return CheckpointError(
        f"quantization_config has {part} with {kind} scales per {spec.granularity.value!r}; "
        f"quantkit reads {known}"
    )
