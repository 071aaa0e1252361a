"""Which device holds which module of a transformers model: accelerate's work, for our linears too.

Quantized linears are not parameters, so accelerate neither sees their bytes nor moves them: it is
told the bytes, and they are loaded where it puts their modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import UnsupportedError, first_line
from quantkit.runtime.placement import ROOM, DeviceMap, mapped_devices
from quantkit.runtime.weights import WeightReader


@dataclass(frozen=True, slots=True)
class ModulePlaces:
    """Names of modules, each with the device of all that is in it; "" holds everything."""

    devices: Mapping[str, torch.device]

    @classmethod
    def of(
        cls,
        model: Any,
        device_map: str | DeviceMap | None,
        reader: WeightReader,
        names: Mapping[str, str],
    ) -> ModulePlaces:
        """Place the modules of an empty model; `names` of its tensors: in the file, and in it.

        Raises UnsupportedError if a map leaves a module out, or the GPUs are too small.
        """
        if device_map is None:
            return cls({"": reader.device})
        if isinstance(device_map, str):
            return cls(_inferred(model, device_map, reader, names))
        from accelerate.utils import check_device_map

        numbers = dict.fromkeys(device_map, 0)
        try:
            check_device_map(model, numbers)
        except ValueError as error:
            raise UnsupportedError(f"device_map: {first_line(error)}") from None
        found = {name: mapped_devices({name: value})[0] for name, value in device_map.items()}
        return cls(found)

    def device_of(self, name: str) -> torch.device:
        """Return the device of a module or tensor: that of the longest name that holds it."""
        holders = [n for n in self.devices if n in ("", name) or name.startswith(f"{n}.")]
        return self.devices[max(holders, key=len)]

    def dispatch(self, model: Any) -> Any:
        """Return the model with its tensors in place, and activations that follow them."""
        if len(set(self.devices.values())) == 1:
            return model.to(next(iter(self.devices.values())))
        from accelerate import dispatch_model

        skipped = getattr(model, "_skip_keys_device_placement", None)
        main = self.devices[next(iter(self.devices))]
        return dispatch_model(model, dict(self.devices), main_device=main, skip_keys=skipped)


def _inferred(
    model: Any, kind: str, reader: WeightReader, names: Mapping[str, str]
) -> dict[str, torch.device]:
    from accelerate import infer_auto_device_map

    devices = mapped_devices(kind)
    if devices[0].type == "cpu":
        return {"": devices[0]}
    free = [torch.cuda.mem_get_info(device)[0] for device in devices]
    found = infer_auto_device_map(
        model,
        max_memory=budgets(kind, free, sum(reader.stored_bytes().values())),
        no_split_module_classes=getattr(model, "_no_split_modules", None),
        special_dtypes=stored_dtypes(reader, names),
    )
    if not set(found.values()) <= set(range(len(devices))):
        raise UnsupportedError(
            f"the model does not fit the free memory of {len(devices)} GPUs; serve the exported "
            "checkpoint on more GPUs, or by an engine that offloads"
        )
    return {name: devices[number] for name, number in found.items()}


def budgets(kind: str, free: list[int], total: int) -> dict[int, int]:
    """Return the bytes that weights may take of each GPU.

    "auto" leaves room in each if there is enough in all, see ROOM; "balanced" fills all of them
    alike, but for what a module that stays whole is above its share.
    """
    share = 1.1 * total / sum(free)
    if kind == "auto":
        share = ROOM if share <= ROOM else 1.0
    return {number: int(min(1.0, share) * left) for number, left in enumerate(free)}


def stored_dtypes(reader: WeightReader, names: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Return the dtypes of quantized weights, by their names in the model."""
    return {
        names[f"{module}.weight"]: torch.float8_e4m3fn
        for module in reader.checkpoint.quantized
        if f"{module}.weight" in names
    }
