"""All rules, by theme. A rule is a function that yields the faults it finds in a Subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.lint.finding import Finding
from quantkit.lint.rules import (
    compressed_tensors,
    experts,
    fp8,
    ignore_list,
    kv_cache,
    method,
    model,
    modelopt,
    scale_values,
    scales,
    side_files,
    structure,
    tensor_parallel,
)
from quantkit.lint.subject import Subject

Rule = Callable[[Subject], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *structure.RULES,
    *method.RULES,
    *compressed_tensors.RULES,
    *fp8.RULES,
    *modelopt.RULES,
    *ignore_list.RULES,
    *experts.RULES,
    *scales.RULES,
    *scale_values.RULES,
    *kv_cache.RULES,
    *tensor_parallel.RULES,
    *model.RULES,
    *side_files.RULES,
)
"""What is asked of a checkpoint, in the order in which findings are shown."""
