"""Offline calibration: from a Hugging Face model to an FP8 checkpoint.

`calibrate` runs the whole pipeline; the modules beside it are its steps. Nothing here imports the
runtime: the two meet in the file format.
"""

from quantkit.calibrate.pipeline import calibrate
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import load_recipe, parse_recipe
from quantkit.calibrate.report import Report

__all__ = ["Recipe", "Report", "calibrate", "load_recipe", "parse_recipe"]
