"""Evaluation: what a checkpoint lost against its original, measured on text.

`evaluate` measures on text, `evaluate_tasks` with the tasks of the lm-evaluation-harness; the
modules beside them are their steps. Sits above both halves of quantkit: the quantized side is the
runtime, the original comes through calibration's sources.
"""

from quantkit.evaluate.evaluation import evaluate
from quantkit.evaluate.result import Result
from quantkit.evaluate.task_evaluation import evaluate_tasks
from quantkit.evaluate.task_result import TaskResult

__all__ = ["Result", "TaskResult", "evaluate", "evaluate_tasks"]
