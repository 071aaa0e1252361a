"""A linter of FP8 checkpoints: which engines load one, and what is wrong with it.

report = lint("my-model-fp8", engines=["vllm"], tensor_parallel=4)
if not report.ok:
    print(report.summary)
"""

from quantkit.lint.check import lint
from quantkit.lint.engines import ENGINES
from quantkit.lint.finding import Finding, Severity
from quantkit.lint.report import Report

__all__ = ["ENGINES", "Finding", "Report", "Severity", "lint"]
