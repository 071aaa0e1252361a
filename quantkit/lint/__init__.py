"""A linter of FP8 checkpoints: which engines load one, and what is wrong with it.

report = lint("my-model-fp8", engines=["vllm"], tp=4)
if not report.ok:
    print(report.summary)
"""

from quantkit.lint.check import lint
from quantkit.lint.engines import ENGINES, check_engines
from quantkit.lint.finding import Finding, Severity
from quantkit.lint.report import Report

__all__ = ["ENGINES", "Finding", "Report", "Severity", "check_engines", "lint"]
