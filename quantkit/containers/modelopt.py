"""NVIDIA Model Optimizer's container: `quant_method: modelopt`, and hf_quant_config.json.

Sources: modelopt/torch/export/convert_hf_config.py, quant_utils.py (0.47) and vLLM
model_executor/layers/quantization/modelopt.py for algorithms, shapes and lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.containers.container import (
    Container,
    Names,
    Shape,
    check_readable,
    mapping,
    names_list,
)
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.scheme import Granularity, QuantSpec, Scheme

SIDE_FILE = "hf_quant_config.json"
"""Older releases wrote it alone, TensorRT-LLM still reads it."""
VERSION = "0.47.0"
"""Of the release whose form is written; engines that look for it take any."""
FP8, PER_CHANNEL = "FP8", "FP8_PER_CHANNEL_PER_TOKEN"
ALGORITHMS: dict[str, tuple[QuantSpec, QuantSpec | None]] = {
    FP8: (QuantSpec(Granularity.TENSOR), QuantSpec(Granularity.TENSOR)),
    PER_CHANNEL: (QuantSpec(Granularity.CHANNEL), QuantSpec(Granularity.TOKEN, dynamic=True)),
    "FP8_PB_WO": (QuantSpec(Granularity.BLOCK, block_shape=(128, 128)), None),
}
"""Weights and inputs of each algorithm; the last is read only."""


class ModelOpt(Container):
    """`quant_method: modelopt`."""

    name = "modelopt"
    method = "modelopt"
    names = Names(
        k_scale=("k_proj.k_scale", "k_scale", "k_proj.output_scale", "kv_scale"),
        v_scale=("v_proj.v_scale", "v_scale", "v_proj.output_scale", "kv_scale"),
    )

    # Its `fp8_cast`, the default of its example, has 448 for the largest value and stores nothing.
    kv_scales_default_to_1 = True

    def to_config(self, scheme: Scheme) -> dict[str, Any]:
        """Return the block as modelopt itself puts it into config.json."""
        algorithm = _algorithm_of(scheme)
        config: dict[str, Any] = {}
        if algorithm == FP8:
            config["config_groups"] = {
                "group_0": {
                    "input_activations": _float8(),
                    "weights": _float8(),
                    "targets": ["Linear"],
                }
            }
        config |= {"ignore": list(scheme.ignore), "quant_algo": algorithm}
        if scheme.kv is not None:
            config["kv_cache_scheme"] = _float8()
        return config | {"producer": _producer(), "quant_method": self.method}

    def side_files(self, scheme: Scheme) -> dict[str, dict[str, Any]]:
        """Return hf_quant_config.json."""
        quantization = {
            "quant_algo": _algorithm_of(scheme),
            "kv_cache_quant_algo": None if scheme.kv is None else FP8,
            "exclude_modules": list(scheme.ignore),
        }
        return {SIDE_FILE: {"producer": _producer(), "quantization": quantization}}

    def from_config(self, block: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a block of config.json, or of all of hf_quant_config.json."""
        nested = block.get("quantization")
        fields = block if nested is None else mapping(nested, "quantization")
        name = str(fields.get("quant_algo")).upper()
        if name not in ALGORITHMS:
            raise CheckpointError(
                f"quantization_config has quant_algo={fields.get('quant_algo')!r}; of modelopt, "
                f"quantkit reads {', '.join(ALGORITHMS)}"
            )
        weights, inputs = ALGORITHMS[name]
        kv = _kv(fields.get("kv_cache_scheme") or fields.get("kv_cache_quant_algo"))
        return check_readable(
            Scheme(weights, inputs, kv, names_list(fields, "ignore", "exclude_modules"))
        )

    def weight_scale_shapes(self, spec: QuantSpec, rows: int, columns: int) -> tuple[Shape, ...]:
        """Return 0-d for a tensor, [N] for channels, [rows, 1, columns, 1] for blocks first.

        A weight of a single block has a 0-d scale.
        """
        own = spec.scale_shape(rows, columns)
        match spec.granularity:
            case Granularity.TENSOR:
                return ((), own)
            case Granularity.CHANNEL:
                return ((rows,), own)
            case _:
                single: tuple[Shape, ...] = ((),) if own == (1, 1) else ()
                return ((own[0], 1, own[1], 1), own, *single)

    def input_scale_shapes(self) -> tuple[Shape, ...]:
        """Return 0-d first."""
        return ((), (1,))

    def kv_scale_shapes(self, spec: QuantSpec, heads: int) -> tuple[Shape, ...]:
        """Return 0-d first."""
        return ((), (1,))


def _algorithm_of(scheme: Scheme) -> str:
    pair = (scheme.weights, scheme.inputs)
    name = next((name for name in (FP8, PER_CHANNEL) if ALGORITHMS[name] == pair), None)
    if name is None or scheme.native:
        raise UnsupportedError(
            "modelopt holds FP8 weights and static inputs with a scale per tensor, or weights per "
            "channel and inputs per token; calibrate with recipe 'fp8-static' or 'fp8-dynamic', "
            "or export to compressed-tensors"
        )
    if scheme.kv is not None and scheme.kv.granularity is not Granularity.TENSOR:
        raise UnsupportedError(
            "modelopt has one KV scale per layer, not per head; calibrate with kv 'fp8', or export "
            "to compressed-tensors"
        )
    return name


def _producer() -> dict[str, str]:
    return {"name": "modelopt", "version": VERSION}


def _float8() -> dict[str, Any]:
    return {"dynamic": False, "num_bits": 8, "type": "float"}


def _kv(value: object) -> QuantSpec | None:
    if not value:
        return None
    is_fp8 = value == FP8
    if isinstance(value, Mapping):
        is_fp8 = (value.get("num_bits"), value.get("type")) == (8, "float")
    if not is_fp8:
        raise CheckpointError(
            f"quantization_config has a KV cache in {value!r}; of modelopt, quantkit reads {FP8}"
        )
    return QuantSpec(Granularity.TENSOR)
