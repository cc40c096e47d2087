"""Checks of a placement: the disk's budget, and dtypes that a device cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anydevice import registry
from anydevice.devices import DISK, Device
from anydevice.dtypes import DtypeLike, dtype_bits
from anydevice.errors import DoesNotFitError, UnsupportedDtypeError
from anydevice.placement.budgets import Budget
from anydevice.placement.placement import Placement
from anydevice.placement.planner import Plan
from anydevice.text import format_bytes

__all__ = ["check_disk", "check_dtypes"]


def check_disk(placement: Placement, bins: Sequence[Budget]) -> None:
    """Check that what is left over fits the disk's budget.

    Raises:
        DoesNotFitError: it does not.
    """
    disk = bins[-1]
    used = placement.bytes_on(DISK)
    if disk.size is None or used <= disk.size:
        return
    said = ", ".join(f"{b.key}: {format_bytes(b.size)}" for b in bins[:-1] if b.size)
    reserve = sum(placement.reserve.values())
    kept = f" ({format_bytes(reserve)} of them reserved for offloaded blocks)" if reserve else ""
    raise DoesNotFitError(
        f"{placement.model} does not fit: {format_bytes(used)} are left over, and the disk "
        + (f"may take {format_bytes(disk.size)}" if disk.size else "is not to be used")
        + f". Budgets: {said}{kept}. Raise one, allow the disk, or pass a smaller dtype."
    )


def check_dtypes(plan: Plan, bins: Sequence[Budget]) -> None:
    """Check that each accelerator of this machine supports the dtypes that it gets.

    Raises:
        UnsupportedDtypeError: one does not.
    """
    here = {device.type for device in registry.available_devices()}
    asked: dict[tuple[str, object], bool] = {}
    for block, d in zip(plan.inventory.blocks, plan.where, strict=True):
        device = bins[d if plan.main is None or bins[d].device.is_accelerator else plan.main].device
        if not device.is_accelerator or device.type not in here:
            continue
        for tensor in (*block.parameters, *block.buffers):
            dtype = plan.inventory.dtypes[tensor]
            question = (device.type, dtype)
            if question not in asked:
                asked[question] = _supports(device, dtype)
            if not asked[question]:
                raise UnsupportedDtypeError(
                    f"{block.name or 'the model'} ({block.kind}) holds {dtype}, which {device} "
                    "cannot hold. Pass dtype= or special_dtypes=, or leave the device out of "
                    "max_memory."
                )


def _supports(device: Device, dtype: DtypeLike) -> bool:
    """Types that torch lacks, or has in name only (int4), are handled by the quantizer."""
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or (dtype_bits(known) < 8 and "quint" not in str(known)):
        return True
    return registry.get_backend(device.type).supports_dtype(known)
