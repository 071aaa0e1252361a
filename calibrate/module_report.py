"""What is reported, and stored, of one linear module and of what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.calibrate.moments import InputSummary, group_name
from quantkit.calibrate.quantized_layer import QuantizedLinear
from quantkit.calibrate.report import ModuleReport
from quantkit.checkpoint import INPUT_MEAN_SQUARE

SMOOTHING = "smoothing"
TOP_CHANNELS = 8
"""Input channels that the report names."""


def module_report(
    linear: QuantizedLinear, inputs: InputSummary | None, is_smoothed: bool = False
) -> ModuleReport:
    """Return what to report of a linear module, and of its input where that was observed."""
    rows, columns = linear.codes.shape
    report = ModuleReport(
        name=linear.name,
        shape=(rows, columns),
        tiers=((SMOOTHING, *linear.tiers) if is_smoothed else linear.tiers),
        format=linear.spec.format,
        weight_sqnr_db=linear.weight_sqnr_db,
        plain_output_sqnr_db=linear.plain_output_sqnr_db,
        output_sqnr_db=linear.output_sqnr_db,
        outlier_ratio=linear.outlier_ratio,
        input_amax=inputs.amax if inputs else linear.input_amax,
        input_range=linear.input_range,
        num_clipped=linear.num_clipped,
        inputs_clipped=linear.inputs_clipped,
        zeroed_share=linear.zeroed_share,
        outlier_columns=0 if linear.columns is None else len(linear.columns),
        bytes=sum(tensor.nbytes for tensor in linear.tensors().values()),
    )
    return report if inputs is None else _with_inputs(report, inputs)


def input_statistics(
    linears: Mapping[str, QuantizedLinear], inputs: Mapping[str, InputSummary]
) -> dict[str, Tensor]:
    """Return what the inputs of each fused group carry, for whoever rounds the weights again."""
    return {
        f"{linear.name}.{INPUT_MEAN_SQUARE}": inputs[key].rms.square()
        for key, linear in linears.items()
        if key in inputs and group_name(key, linears) == key
    }


def _with_inputs(report: ModuleReport, inputs: InputSummary) -> ModuleReport:
    """Add where the outliers of the module's input are."""
    rms = inputs.rms
    middle = rms.median().item()
    largest = torch.topk(rms, min(TOP_CHANNELS, len(rms)))
    return replace(
        report,
        input_outlier_ratio=rms.max().item() / middle if middle > 0 else None,
        top_input_channels=tuple(
            (channel, value)
            for channel, value in zip(
                largest.indices.tolist(), largest.values.tolist(), strict=True
            )
        ),
    )
