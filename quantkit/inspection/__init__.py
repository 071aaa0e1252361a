"""Inspection: what calibration did to a checkpoint, as tables, JSON or one HTML page.

`inspect` gathers the facts of a folder; the modules beside it show them. Reads quantkit.json and
the headers of the weight files, and runs no model.
"""

from quantkit.inspection.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect"]
