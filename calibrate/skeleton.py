"""The source model as transformers modules whose weights come and go.

The modules are built empty; one decoder layer at a time is filled from the source, used, and
emptied again. Experts that transformers holds in one tensor a layer are split into linear modules,
as checkpoints have them. Where transformers converts other tensors on loading, the whole model is
loaded instead, and emptied layer by layer as it is used up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.fused_source import with_split_experts
from quantkit.calibrate.source import ModelSource
from quantkit.errors import SourceError, UnsupportedError
from quantkit.experts import find_fused, split_experts
from quantkit.linears import check_model_type, is_linear
from quantkit.model_names import names_in_model

logger = logging.getLogger("quantkit")

_GATE = re.compile(r"(^|\.|_)(gate|router)(\.|$)")


class Skeleton:
    """The model's modules, its decoder layers, and how their names map to the source's tensors.

    `layers[i]` is a decoder layer and `layer_names[i]` its full module name; `experts` are lists of
    experts by full module name. `source` has each expert's tensors by themselves, also where the
    file does not. `dtype` is what the modules compute in.
    """

    def __init__(
        self, source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._is_whole = False
        check_model_type(config.model_type)
        self.model = _build_empty(config, source, dtype)
        fused = find_fused(self.model)
        self.source = with_split_experts(source, names_in_model(self.model, source.names), fused)
        self.experts = split_experts(self.model, fused)
        self._source_names = self._map_names()
        if self._source_names is None:
            logger.warning(
                "%s stores tensors in a form that transformers converts on loading: the whole "
                "model is loaded at once",
                source.name,
            )
            self.model = source.load_model(dtype).eval()
            self.experts = split_experts(self.model, fused)
            self._is_whole = True
            self._source_names = self._known_names()
        self.decoder = _decoder(self.model)
        self.layers, list_name = _decoder_layers(self.model, self.decoder)
        self.layer_names = [f"{list_name}.{number}" for number in range(len(self.layers))]

    @property
    def tied_head(self) -> tuple[str, str] | None:
        """(head weight, embedding weight) when the two are one tensor, by module names."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        config = self.model.config.get_text_config()
        if head is None or not getattr(config, "tie_word_embeddings", False):
            return None
        return f"{self.name_of(head)}.weight", f"{self.name_of(embedding)}.weight"

    @property
    def has_experts(self) -> bool:
        """Tell whether tokens are routed to experts."""
        return bool(self._expert_counts())

    def name_of(self, module: nn.Module) -> str:
        """Return the full name of one of the model's modules."""
        names: Iterator[tuple[str, nn.Module]] = self.model.named_modules()
        return next(name for name, other in names if other is module)

    def source_name(self, name: str) -> str | None:
        """Return the source's name for a parameter of the model, or None if it has no such one."""
        names = self._source_names or {}
        return names.get(name)

    def disk_name(self, module_name: str) -> str:
        """Return the name of a module in the source's terms: the base model's prefix may differ."""
        weight = self.source_name(f"{module_name}.weight")
        if weight is not None:
            return weight.removesuffix(".weight")
        for name, stored in (self._source_names or {}).items():
            inside = name.removeprefix(module_name)
            if name.startswith(f"{module_name}.") and stored.endswith(inside):
                return stored.removesuffix(inside)
        return self._common_name(module_name) or module_name

    def _common_name(self, module_name: str) -> str:
        """Return what the source's names of a module's tensors begin with; "" if it has none.

        For models whose parts have other names on disk. Raises UnsupportedError if other tensors
        begin so too.
        """
        names, inside = self._source_names or {}, f"{module_name}."
        own = {other for name, other in names.items() if name.startswith(inside)}
        levels = zip(*(name.split(".")[:-1] for name in own), strict=False)
        prefix = ".".join(level[0] for level in takewhile(lambda x: len(set(x)) == 1, levels))
        same = {name for name in names.values() if name.startswith(f"{prefix}.")}
        if not same <= own:
            raise UnsupportedError(
                f"{self.source.name} stores {module_name} under names that begin like those of "
                f"other modules ({prefix}); quantkit cannot tell them apart"
            )
        return prefix

    def linear_modules(self) -> dict[str, nn.Linear]:
        """Return {full name: module} of every linear layer, in the model's order."""
        return {name: module for name, module in self.model.named_modules() if is_linear(module)}

    def routers(self) -> set[str]:
        """Return the full names of the modules that choose experts or weigh them.

        Engines keep these in the source's dtype, whatever a checkpoint has.
        """
        found = set()
        for name, count in self._expert_counts().items():
            parent = name.rpartition(".")[0]
            for part, module in self.model.get_submodule(parent).named_modules():
                weight = getattr(module, "weight", None)
                is_gate = _GATE.search(part) and not f"{parent}.{part}".startswith(f"{name}.")
                if is_gate and isinstance(weight, Tensor) and weight.shape[0] in (1, count):
                    found.add(f"{parent}.{part}")
        return found

    def fused_experts(self) -> dict[str, nn.Module]:
        """Return the lists of experts that could not be split, by full module name."""
        return {n: m for n, m in self.model.named_modules() if hasattr(m, "is_transposed")}

    def _expert_counts(self) -> dict[str, int]:
        fused = {n: getattr(m, "num_experts", 0) for n, m in self.fused_experts().items()}
        return fused | {name: len(experts) for name, experts in self.experts.items()}

    def load(self, prefix: str) -> None:
        """Fill every empty parameter and buffer below `prefix` ("" for all outside the layers)."""
        for name, parameter in list(self.model.named_parameters()):
            if self._belongs(name, prefix) and parameter.is_meta:
                self._set(name, self._read(name))
        for name, buffer in list(self.model.named_buffers()):
            if self._belongs(name, prefix):
                stored = self.source_name(name)
                value = self.source.tensor(stored) if stored else buffer
                self._set(name, value.to(self.device))

    def unload(self, prefix: str) -> None:
        """Empty every parameter below `prefix`, freeing its memory."""
        for name, parameter in list(self.model.named_parameters()):
            if self._belongs(name, prefix):
                self._set(name, parameter.to("meta"))

    @contextmanager
    def visit(self, prefix: str) -> Iterator[None]:
        """Load what lies below `prefix` for a while; its weights are needed again later.

        What was not loaded here is not freed: a model that had to be loaded as a whole cannot be
        loaded again by layers.
        """
        self.load(prefix)
        try:
            yield
        finally:
            if not self._is_whole:
                self.unload(prefix)

    def _belongs(self, name: str, prefix: str) -> bool:
        if prefix:
            return name.startswith(f"{prefix}.")
        return not any(name.startswith(f"{layer}.") for layer in self.layer_names)

    def stored_name(self, name: str) -> str | None:
        """Return the source's tensor with a parameter's values; of a tied head, the embedding."""
        stored = self.source_name(name)
        if stored is None and self.tied_head and name == self.tied_head[0]:
            return self.source_name(self.tied_head[1])
        return stored

    def _read(self, name: str) -> Tensor:
        stored = self.stored_name(name)
        if stored is None:
            raise SourceError(f"{self.source.name} has no tensor {name}")
        tensor, parameter = self.source.tensor(stored), self.model.get_parameter(name)
        if tensor.shape != parameter.shape:
            raise SourceError(
                f"{self.source.name}: tensor {stored} has shape {list(tensor.shape)}, the config "
                f"asks for {list(parameter.shape)}"
            )
        # Some models keep a few parameters in float32, whatever they compute in.
        return tensor.to(self.device, parameter.dtype)

    def _set(self, name: str, value: Tensor) -> None:
        owner_name, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[leaf] = value

    def _map_names(self) -> dict[str, str] | None:
        """Map parameter and buffer names to the source's, or None if one has no counterpart."""
        names = self._known_names()
        tied = self.tied_head
        for name, _ in self.model.named_parameters():
            if name not in names and not (tied and name in tied):
                return None
        return names

    def _known_names(self) -> dict[str, str]:
        """Names that are the same in both, or that transformers only renames.

        The base model's prefix may be there or not.
        """
        stored = set(self.source.names)
        prefix = f"{self.model.base_model_prefix}."
        names = {}
        for name in self.model.state_dict():
            for candidate in (name, name.removeprefix(prefix), f"{prefix}{name}"):
                if candidate in stored:
                    names[name] = candidate
                    break
        left = sorted(stored - set(names.values()))
        renamed = names_in_model(self.model, left)
        return names | {inner: outer for outer, inner in renamed.items() if inner not in names}


def _build_empty(config: Any, source: ModelSource, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    trust = getattr(source, "trust_remote_code", False)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedError(f"{source.name} is not a causal language model: {reason}") from error
    return model.eval()


def _decoder(model: Any) -> nn.Module:
    """Return the part of the model that embeds tokens and runs the layers, without the head."""
    found: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    # Some models call their output head a decoder.
    has_layers = any(isinstance(module, nn.ModuleList) for module in found.modules())
    return found if has_layers else model.base_model


def _decoder_layers(model: nn.Module, decoder: nn.Module) -> tuple[nn.ModuleList, str]:
    """Find the decoder layers: the longest outermost ModuleList of blocks of one class."""
    best: tuple[nn.ModuleList, str] | None = None
    seen: list[str] = []
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{s}.") for s in seen):
            continue
        seen.append(name)  # lists inside a list (experts) are not layers of the model
        same_class = len({type(block) for block in module}) == 1
        if same_class and (best is None or len(module) > len(best[0])):
            best = (module, name)
    if best is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of equal decoder layers; quantkit cannot "
            "calibrate it layer by layer"
        )
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return best[0], f"{prefix}.{best[1]}" if prefix else best[1]
