"""The linear layers of a checkpoint, as its tensors' names show them: no model is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from quantkit.lint.folder import Folder
from quantkit.lint.quantization import Group, Quantization
from quantkit.scheme import FUSED_GROUPS, fused_siblings
from quantkit.tensor_file import TensorEntry

WEIGHT = ".weight"
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
HEADS = ("lm_head", "embed_out", "output_layer")
"""What output heads are called."""
COLUMN_PARALLEL = {
    *(member for group in FUSED_GROUPS for member in group if len(member) > 1),
    *("qkv_proj", "gate_up_proj", "q_b_proj", "kv_b_proj", "fc1"),
}
"""Linears that tensor parallelism cuts by rows of the weight."""
ROW_PARALLEL = {"o_proj", "out_proj", "down_proj", "w2", "fc2"}
"""Linears that tensor parallelism cuts by columns of the weight."""
PROJECTIONS = COLUMN_PARALLEL | ROW_PARALLEL | {"q_a_proj", "kv_a_proj_with_mqa", "c_attn"}
"""Names that only linear layers have."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its module's name, its weight [rows, columns], and how it is quantized.

    `group` is None where the configuration says nothing of it.
    """

    module: str
    weight: TensorEntry
    group: Group | None

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.module.rpartition(".")[2]

    @property
    def rows(self) -> int:
        """Output features."""
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.weight.shape[1]

    @property
    def is_coded(self) -> bool:
        """Whether the weight is stored in 8 bits."""
        return is_coded(self.weight)

    @property
    def is_head(self) -> bool:
        """Whether it makes logits."""
        return self.leaf in HEADS


class Linears:
    """All linear layers that can be told from tensors alone, by module name."""

    def __init__(self, folder: Folder, quantization: Quantization) -> None:
        self._folder = folder
        self.by_name: dict[str, Linear] = {}
        weights = [e for e in folder.tensors.values() if e.name.endswith(WEIGHT)]
        matrices = [e for e in weights if len(e.shape) == 2]
        coded = {_leaf(e) for e in matrices if is_coded(e)}
        for entry in matrices:
            if is_coded(entry) or _leaf(entry) in coded | PROJECTIONS or _leaf(entry) in HEADS:
                module = entry.name.removesuffix(WEIGHT)
                self.by_name[module] = Linear(module, entry, quantization.group_of(module))

    @cached_property
    def coded(self) -> list[Linear]:
        """Those whose weight is in 8 bits."""
        return [linear for linear in self.by_name.values() if linear.is_coded]

    @cached_property
    def plain(self) -> list[Linear]:
        """Those whose weight is not."""
        return [linear for linear in self.by_name.values() if not linear.is_coded]

    def fused(self) -> Iterator[list[Linear]]:
        """Yield the linears that engines run as one, where there are at least two of them."""
        seen: set[str] = set()
        for module in self.by_name:
            siblings = fused_siblings(module)
            if module in seen or len(siblings) == 1:
                continue
            seen.update(siblings)
            found = [self.by_name[name] for name in siblings if name in self.by_name]
            if len(found) > 1:
                yield found

    def experts(self) -> Iterator[list[Linear]]:
        """Yield all experts' linears of one layer together."""
        layers: dict[str, list[Linear]] = {}
        for module, linear in self.by_name.items():
            parent, found, _ = module.partition(".experts.")
            if found:
                layers.setdefault(parent, []).append(linear)
        yield from layers.values()

    def scale_of(self, linear: Linear) -> TensorEntry | None:
        """Return the scale of a weight, whatever its name."""
        names = (f"{linear.module}.{name}" for name in SCALE_NAMES)
        return next((self._folder.tensors[n] for n in names if n in self._folder.tensors), None)


def is_coded(entry: TensorEntry) -> bool:
    """Whether a tensor is in an 8-bit float format, or may be (bytes)."""
    return entry.dtype.startswith("F8_E") and entry.dtype != "F8_E8M0"


def _leaf(entry: TensorEntry) -> str:
    return entry.name.removesuffix(WEIGHT).rpartition(".")[2]
