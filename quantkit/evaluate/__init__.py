"""Evaluation: what a checkpoint lost against its original, measured on text.

`evaluate` is the whole run; the modules beside it are its steps. Sits above both halves of
quantkit: the quantized side is the runtime, the original comes through calibration's sources.
"""

from quantkit.evaluate.evaluation import evaluate
from quantkit.evaluate.result import Result

__all__ = ["Result", "evaluate"]
