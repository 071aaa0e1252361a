"""From a checkpoint folder to an engine: resolve the options, choose the decoder, read the weights.

A model the decoder knows runs there; any other runs through transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import CheckpointError, UnsupportedError, nearest
from quantkit.extension import EXTENSION_LOADED, load_cuda_kernels
from quantkit.numerics import E4M3
from quantkit.ops import CUDA_FEW_ROWS
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.placement import DeviceMap, Placement, mapped_devices, place
from quantkit.runtime.rope import rotary_frequencies
from quantkit.runtime.rotation import Rotation
from quantkit.runtime.saturation import Saturation
from quantkit.runtime.shapes import model_shape, parse_config
from quantkit.runtime.weights import WeightReader
from quantkit.scheme import QuantSpec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of activations."""

logger = logging.getLogger("quantkit")


def load_engine(
    path: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    kv: str = "auto",
    activations: str = "auto",
    threads: int | None = None,
    device_map: str | DeviceMap | None = None,
    saturation: Saturation | None = None,
) -> Engine:
    """Load a quantized checkpoint for inference.

    Args:
        path: folder that `calibrate` or `export` wrote, or another tool in a format of
            `quantkit.containers`.
        device: "cpu", "cuda", "cuda:N", or "auto": CUDA if there is a GPU.
        dtype: of activations and unquantized weights: "float32", "bfloat16", "float16", or "auto":
            as the checkpoint's unquantized weights.
        kv: "fp8" stores keys and values in 8 bits with the calibrated scales, "none" in `dtype`,
            "auto" does what the checkpoint declares.
        activations: "quantized" rounds the inputs of linears to 8 bits as the scheme declares,
            "full" leaves them alone, which is at least as accurate. "auto" leaves them alone on a
            CPU; a GPU then rounds where it is faster, with more than `ops.CUDA_FEW_ROWS` tokens.
        threads: CPU threads of torch, for the whole process; None leaves them.
        device_map: what goes to which GPU, in place of `device`; see `quantkit.load_fp8`.
        saturation: counts inputs, keys and values that static scales cannot hold, as the model
            runs; slower, and a GPU then multiplies the rounded inputs in 16 bits.

    Raises CheckpointError, with the file or tensor, if the checkpoint is damaged or incomplete, and
    UnsupportedError for an option or a model that quantkit cannot serve.
    """
    _check_option("kv", kv, ("auto", "fp8", "none"))
    _check_option("activations", activations, ("auto", "full", "quantized"))
    targets = _targets(device, device_map)
    if threads is not None:
        _set_threads(threads)
    checkpoint = open_checkpoint(path, kv=kv != "none")
    if kv == "fp8" and checkpoint.scheme.kv is None:
        raise CheckpointError(f"{path} has no KV scales; load with kv='none', or calibrate again")
    for kind in {target.type for target in targets}:
        _report_kernels(kind)
    values = _resolve_dtype(checkpoint, dtype)
    in_8_bits = all(_multiplies_8_bits(target, values) for target in targets)
    inputs = _input_spec(checkpoint, activations, in_8_bits)
    few_rows = (CUDA_FEW_ROWS if activations == "auto" else 0) if in_8_bits else None
    reader = WeightReader(checkpoint, targets[0], values, inputs, few_rows, saturation)
    quantize_kv = kv != "none" and checkpoint.scheme.kv is not None
    return _build(reader, quantize_kv, device_map)


def resolve_device(device: str) -> torch.device:
    """Return the torch device for "auto", "cpu", "cuda" or "cuda:N"."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    _check_option("device", kind, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device 'cuda' was asked for, and torch sees no GPU; use 'cpu'")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UnsupportedError(f"device {device!r} is not known; use cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UnsupportedError(f"device {device!r} is the number of no GPU: 0 to {count - 1}")
    return found


def _targets(device: str, device_map: str | DeviceMap | None) -> list[torch.device]:
    """Return every device that may hold weights, without doubles."""
    if device_map is None:
        return [resolve_device(device)]
    if device != "auto":
        raise UnsupportedError(
            f"device {device!r} and device_map exclude each other; leave one of them out"
        )
    return [resolve_device(str(mapped)) for mapped in mapped_devices(device_map)]


def _build(reader: WeightReader, quantize_kv: bool, device_map: str | DeviceMap | None) -> Engine:
    config = parse_config(reader.checkpoint.config)
    try:
        shape = model_shape(config)
    except UnsupportedError as reason:
        from quantkit.runtime.transformers_engine import TransformersEngine

        logger.warning("running the model through transformers, more slowly: %s", reason)
        return TransformersEngine(reader, config, quantize_kv, device_map)
    placement = Placement.on(reader.device, shape.num_layers)
    if device_map is not None:
        placement = place(device_map, reader.stored_bytes(), shape.num_layers)
    scales = None
    if quantize_kv:
        scales = [
            reader.on(device).kv_scales(number) for number, device in enumerate(placement.layers)
        ]
    kv = reader.checkpoint.scheme.kv
    rotations = [
        Rotation(frequencies, factor) for frequencies, factor in rotary_frequencies(config)
    ]
    fmt = E4M3 if kv is None else kv.fmt
    return Decoder(reader, shape, rotations, scales, fmt, placement, reader.saturation)


@lru_cache(maxsize=2)
def _report_kernels(device_type: str) -> None:
    """Load the kernels for a device; say once per process if they are missing."""
    loaded = load_cuda_kernels() if device_type == "cuda" else EXTENSION_LOADED
    if not loaded:
        logger.warning("the compiled kernels are not in use; the reference kernels are slow")


def _set_threads(threads: int) -> None:
    if threads < 1:
        raise UnsupportedError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)


def _input_spec(checkpoint: Checkpoint, activations: str, in_8_bits: bool) -> QuantSpec | None:
    """Return how inputs are rounded, if at all; `in_8_bits` if they can be multiplied so."""
    spec = checkpoint.scheme.inputs
    if activations == "full" or (activations == "auto" and not in_8_bits):
        return None
    if spec is None and activations == "quantized":
        raise UnsupportedError(
            f"{checkpoint.path} quantizes weights only; load it with activations='auto'"
        )
    return spec


def _multiplies_8_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `scaled_mm` has a kernel on this device that gives results in `dtype`."""
    if device.type != "cuda" or dtype == torch.float32 or not load_cuda_kernels():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _resolve_dtype(checkpoint: Checkpoint, dtype: str) -> torch.dtype:
    if dtype != "auto":
        _check_option("dtype", dtype, ("auto", *DTYPES))
        return DTYPES[dtype]
    config = checkpoint.config
    for level in (config, config.get("text_config") or {}):
        stored = level.get("dtype") or level.get("torch_dtype")
        if stored is not None:
            name = str(stored).removeprefix("torch.")
            if name not in DTYPES:
                raise UnsupportedError(
                    f"config.json has dtype {name!r}; choose one with dtype={'|'.join(DTYPES)}"
                )
            return DTYPES[name]
    # Configs of old files do not say; their norms and embeddings do.
    return _plain_dtype(checkpoint)


def _plain_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the first weight that is in one of activations."""
    quantized = set(checkpoint.quantized)
    for name in checkpoint.names:
        if name.endswith(".weight") and name.removesuffix(".weight") not in quantized:
            found = checkpoint.tensor(name).dtype
            if found in DTYPES.values():
                return found
    raise CheckpointError(
        f"{checkpoint.path} says nowhere what dtype it runs in; choose one with "
        f"dtype={'|'.join(DTYPES)}"
    )


def _check_option(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        hint = nearest(value, known)
        raise UnsupportedError(f"{option} {value!r} is not known{hint}; use {', '.join(known)}")
