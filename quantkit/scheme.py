"""How tensors are quantized: Granularity, QuantSpec, Scheme.

A QuantSpec describes one tensor, a Scheme a whole model. Both are frozen values; they know shapes
and names, not data. A QuantSpec has one JSON form, compressed-tensors' own, which several
containers use; how a whole Scheme is written is theirs to say (`quantkit.containers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import Any

from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError, nearest
from quantkit.numerics import FORMATS, Format, Tile

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Sibling linears that read one input and that engines fuse into one matmul."""
_FLOATS = (None, "torch.float32", "torch.bfloat16", "torch.float16")
_ORDERS = (None, "weight", "static")
PORTABLE_FORMAT = "e4m3"
"""The format of weights that engines other than quantkit read."""


class Granularity(StrEnum):
    """Which elements share a scale; the values are compressed-tensors' words for it.

    | member  | scale of a weight [N, K]       | scale of an input [tokens, K] |
    |---------|--------------------------------|-------------------------------|
    | TENSOR  | [1]                            | [1]                           |
    | CHANNEL | [N, 1]                         | -                             |
    | TOKEN   | -                              | [tokens, 1]                   |
    | GROUP   | -                              | [tokens, ceil(K / group)]     |
    | BLOCK   | [ceil(N / rows), ceil(K / columns)] | -                        |
    | HEAD    | keys and values only: [heads, 1, 1] |                          |
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    GROUP = "group"
    BLOCK = "block"
    HEAD = "attn_head"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How one tensor is quantized: symmetric, 8-bit float."""

    granularity: Granularity
    format: str = "e4m3"
    dynamic: bool = False  # True: the scale is computed from each input at run time
    group_size: int | None = None  # columns per scale; GROUP only
    block_shape: tuple[int, int] | None = None  # rows, columns per scale; BLOCK only

    def __post_init__(self) -> None:
        """Raise RecipeError where the fields contradict each other."""
        if self.format not in FORMATS:
            hint = nearest(self.format, FORMATS)
            raise RecipeError(f"unknown format {self.format!r}{hint}; known: {', '.join(FORMATS)}")
        _require(self.granularity, Granularity.GROUP, "group_size", self.group_size)
        _require(self.granularity, Granularity.BLOCK, "block_shape", self.block_shape)
        sizes = [size for size in (self.group_size, *(self.block_shape or ())) if size is not None]
        if any(not isinstance(size, int) or size < 1 for size in sizes):
            raise RecipeError(f"group_size and block_shape must be integers above 0, got {sizes}")

    @property
    def fmt(self) -> Format:
        """The 8-bit float format itself."""
        return FORMATS[self.format]

    def tile(self, rows: int, columns: int) -> Tile:
        """Return the rows and columns that share one scale in a (rows, columns) matrix."""
        match self.granularity:
            case Granularity.TENSOR:
                return (max(rows, 1), max(columns, 1))
            case Granularity.GROUP:
                return (1, self.group_size or columns)
            case Granularity.BLOCK:
                return self.block_shape or (rows, columns)
            case Granularity.CHANNEL | Granularity.TOKEN:
                return (1, max(columns, 1))
            case Granularity.HEAD:
                raise RecipeError("granularity 'attn_head' applies to the KV cache only")

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scale as stored for a (rows, columns) matrix."""
        if self.granularity is Granularity.TENSOR:
            return (1,)
        tile = self.tile(rows, columns)
        return (ceil(rows / tile[0]), ceil(columns / tile[1]))

    def grid(self, stored: Tensor) -> Tensor:
        """Return a stored scale as the two-dimensional grid that `numerics` works on."""
        return stored.reshape(1, 1) if self.granularity is Granularity.TENSOR else stored

    def to_config(self) -> dict[str, Any]:
        """Return the compressed-tensors form of this spec."""
        config: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": self.granularity.value,
            "dynamic": self.dynamic,
            "group_size": self.group_size,
        }
        if self.block_shape is not None:
            config["block_structure"] = list(self.block_shape)
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantSpec:
        """Parse the compressed-tensors form; raises CheckpointError on what is not 8-bit float."""
        _check_plain_float8(config)
        try:
            granularity = Granularity(config.get("strategy", "tensor"))
        except ValueError:
            known = ", ".join(Granularity)
            raise CheckpointError(
                f"quantization_config has strategy {config['strategy']!r}; known: {known}"
            ) from None
        group = config.get("group_size") if granularity is Granularity.GROUP else None
        block = config.get("block_structure") if granularity is Granularity.BLOCK else None
        try:
            rows, columns = block or (0, 0)
            return cls(
                granularity=granularity,
                dynamic=bool(config.get("dynamic")),
                group_size=group,
                block_shape=(int(rows), int(columns)) if block else None,
            )
        except (RecipeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"quantization_config has strategy {granularity.value!r} with group_size={group}, "
                f"block_structure={block}: {error}"
            ) from None


def _check_plain_float8(config: Mapping[str, Any]) -> None:
    kind = (config.get("num_bits"), config.get("type"), config.get("symmetric", True))
    if kind != (8, "float", True):
        raise CheckpointError(
            "quantization_config describes num_bits={}, type={}, symmetric={}; quantkit reads "
            "symmetric 8-bit floats only".format(*kind)
        )
    # "local": a second level of scales; scale_dtype: scales in 8 bits; actorder: columns permuted.
    known = {"dynamic": (False, True, None), "scale_dtype": _FLOATS, "actorder": _ORDERS}
    for key, values in known.items():
        if config.get(key) not in values:
            raise CheckpointError(
                f"quantization_config has {key}={config[key]!r}; quantkit reads 8-bit floats with "
                "one level of plain scales"
            )


def _require(actual: Granularity, owner: Granularity, name: str, value: object) -> None:
    """Check that `value` is given exactly for the granularity that owns it."""
    if (value is not None) != (actual is owner):
        verb = "needs" if actual is owner else "takes no"
        raise RecipeError(f"granularity {actual.value!r} {verb} {name}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model is quantized: its linear weights, their inputs, and the KV cache.

    `ignore` lists the full names of the linear modules that stay in the source dtype. `native`
    says that only quantkit loads the result: modules may have 8-bit formats of their own
    (`formats`: full name to format) and input channels beside the 8-bit matrix, and layers may keep
    keys and values as they are (`kv_ignore`: their numbers).
    """

    weights: QuantSpec
    inputs: QuantSpec | None = None
    kv: QuantSpec | None = None
    ignore: tuple[str, ...] = ()
    native: bool = False
    formats: Mapping[str, str] = field(default_factory=dict)
    kv_ignore: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise RecipeError for what no portable container can say."""
        if self.native:
            return
        if self.formats or self.weights.format != PORTABLE_FORMAT:
            raise RecipeError(f"a portable checkpoint holds {PORTABLE_FORMAT!r} weights only")
        if self.kv is not None and self.kv.format != PORTABLE_FORMAT:
            raise RecipeError(f"a portable checkpoint has an {PORTABLE_FORMAT!r} KV cache only")
        if self.kv_ignore:
            raise RecipeError("a portable checkpoint has a KV cache of one kind in all layers")

    def weights_of(self, module: str) -> QuantSpec:
        """Return how the weight of one module is quantized."""
        name = self.formats.get(module)
        return self.weights if name is None else replace(self.weights, format=name)


def fused_siblings(module: str) -> tuple[str, ...]:
    """Return the full names of all members of the fused group that `module` would belong to.

    `model.layers.0.self_attn.q_proj` gives q_proj, k_proj and v_proj of that layer; a module that
    no engine fuses gives itself alone. Members that the model lacks are listed all the same.
    """
    parent, _, leaf = module.rpartition(".")
    for group in FUSED_GROUPS:
        if leaf in group:
            return tuple(f"{parent}.{member}" if parent else member for member in group)
    return (module,)
