"""Names of tensors in a checkpoint, and in the model that transformers builds of it.

transformers renames some tensors on loading (`block_sparse_moe` to `mlp`), and files may lack or
have the prefix of the base model. Knows names only, never reads a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def names_in_model(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Map names in the checkpoint to names in the model.

    Tensors that transformers would merge with others have no counterpart and are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if type(transform) is WeightRenaming]
    mapping = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        if renamed in known:
            mapping[name] = renamed
        elif name in known:  # a rule for other tensors that this one looks like
            mapping[name] = name
    return mapping


def is_converted(model: Any, name: str) -> bool:
    """Tell whether transformers computes a parameter of the model from other tensors on loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    patterns = [
        pattern
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightConverter)
        for pattern in transform.target_patterns
    ]
    return any(re.search(pattern.lstrip("."), name) for pattern in patterns)


def merged_names(model: Any, target: str) -> list[str]:
    """Return what transformers stacks one by one into the parameter `target`, in its order.

    `model.layers.0.mlp.experts.gate_up_proj` gives [`gate_proj`, `up_proj`]: the last parts of the
    names, without `.weight`, of what the checkpoint has for each expert. Empty if the parameter
    is not made of such.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    for transform in get_model_conversion_mapping(model):
        if not isinstance(transform, WeightConverter) or len(transform.target_patterns) != 1:
            continue
        patterns = transform.source_patterns
        each = all(".*." in pattern and pattern.endswith(".weight") for pattern in patterns)
        if each and f".{target}".endswith(f".{transform.target_patterns[0].lstrip('.')}"):
            return [pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns]
    return []
