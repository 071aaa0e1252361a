"""Export: a checkpoint in the formats that other engines load, with a model card, and to the Hub.

`export` is the whole run; the modules beside it are its steps.
"""

from quantkit.export.exporting import export
from quantkit.export.result import Export, ExportRefusedError

__all__ = ["Export", "ExportRefusedError", "export"]
