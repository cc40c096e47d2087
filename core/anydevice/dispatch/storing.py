"""Moving weights to the devices that they are to be stored on."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from anydevice import registry
from anydevice.checkpoint.mapped import is_unwritten
from anydevice.devices import DISK, Device
from anydevice.errors import DoesNotFitError, ModelError, UnsupportedDtypeError
from anydevice.offload_store.accelerate_format import OffloadedWeightsLoader
from anydevice.offload_store.store import require_folder, write_store
from anydevice.relocation import Relocation
from anydevice.sizes import allocated_bytes, tensor_bytes
from anydevice.text import format_bytes, list_some
from anydevice.ties import Weight

__all__ = ["check_memory", "explain_lack", "prepare_storing"]


def prepare_storing(
    weights: Sequence[Weight],
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
) -> Relocation:
    """Make the values of weights on their devices; the model is not changed.

    Args:
        weights: of one model.
        state_dict: values of weights that are stored on the host or the disk.
        offload_dir: where weights for the disk are written, or are already.
        offload_index: where each is in ``offload_dir``.

    Raises:
        ModelError: a weight has no value, or must be written and no folder is given.
        DoesNotFitError: a device lacks memory.
        UnsupportedDtypeError: a device does not support the dtype of a weight.
        OffloadStoreError: the folder cannot be used.
    """
    if offload_dir is not None:
        require_folder(offload_dir)
    if state_dict is None and offload_index is None:
        weights = [w for w in weights if not _is_stored(w)]
    values = _given(weights, state_dict, offload_dir, offload_index)
    _check_values(weights, values)
    to_write = [
        w for w in weights if w.device == DISK and not _is_on_disk(values.get(id(w), w.tensor))
    ]
    if to_write and offload_dir is None:
        raise ModelError(
            f"{list_some([w.names[0] for w in to_write])} are placed on the disk and must be "
            "written there: give offload_dir (offload_folder), the folder for it"
        )
    check_memory(weights)
    if to_write and offload_dir is not None:
        store = write_store(
            offload_dir, {w.names[0]: values.get(id(w), w.tensor) for w in to_write}
        )
        values |= {id(w): store[w.names[0]] for w in to_write}
    relocation = Relocation()
    for weight in weights:
        with explain_lack(weight):
            relocation.add(weight, values.get(id(weight)))
    return relocation


@contextlib.contextmanager
def explain_lack(weight: Weight) -> Iterator[None]:
    """Say which device ran out of memory while the new value of a weight was made.

    Raises:
        DoesNotFitError: the weight's device did.
    """
    try:
        yield
    except Exception as error:
        device = weight.device
        if device.is_accelerator and registry.get_backend(device.torch).is_out_of_memory(error):
            raise DoesNotFitError(
                f"{device} ran out of memory while weights were moved to it; the model is "
                f"unchanged. Place less on it, by device_map or max_memory. ({error!s:.300})"
            ) from error
        raise


def _is_stored(weight: Weight) -> bool:
    """Whether a weight is where it is to be stored already."""
    tensor = weight.tensor
    if tensor.is_meta or tensor.is_inference() or not weight.is_there:
        return False
    return weight.device != DISK or _is_on_disk(tensor)


def check_memory(weights: Sequence[Weight]) -> None:
    """Make sure that the devices have memory for weights that are not there yet.

    Raises:
        DoesNotFitError: a device lacks memory.
        UnsupportedDtypeError: a device does not support the dtype of a weight.
    """
    coming: dict[Device, int] = defaultdict(int)
    for weight in weights:
        device = weight.device
        if not device.is_accelerator or weight.is_there:
            continue
        if not registry.get_backend(device.torch).supports_dtype(weight.tensor.dtype):
            raise UnsupportedDtypeError(
                f"{device} cannot hold {weight.names[0]} of {weight.tensor.dtype}: place it on "
                "another device, or give the model another dtype"
            )
        coming[device] += allocated_bytes(tensor_bytes(weight.tensor))
        if weight.tensor.grad is not None:
            coming[device] += allocated_bytes(tensor_bytes(weight.tensor.grad))
    for device, size in coming.items():
        free = _free(device)
        if free is not None and size > free:
            raise DoesNotFitError(
                f"weights of {format_bytes(size)} are placed on {device}, which has "
                f"{format_bytes(free)} free. Give the map less for it, or a budget: "
                f"max_memory={{'{device}': '{format_bytes(free)}'}}"
            )


def _free(device: Device) -> int | None:
    """Free bytes of a device; None when it does not tell."""
    with contextlib.suppress(NotImplementedError):
        return registry.measure_memory(device.torch).free
    return None


def _given(
    weights: Sequence[Weight],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> dict[int, torch.Tensor]:
    """Values that weights get in place of their own."""
    values: dict[int, torch.Tensor] = {}
    for weight in weights:
        if weight.device.is_accelerator and not weight.tensor.is_meta:
            continue
        name = next((n for n in weight.names if state_dict is not None and n in state_dict), None)
        if name is not None and state_dict is not None and not state_dict[name].is_meta:
            values[id(weight)] = state_dict[name].detach()
    lacking = [w for w in weights if w.tensor.is_meta and id(w) not in values]
    stored = _stored(offload_dir, offload_index) if lacking or offload_index else {}
    wanted = [w for w in weights if w.device == DISK] if offload_index else lacking
    for weight in {id(w): w for w in (*lacking, *wanted)}.values():
        name = next((n for n in weight.names if n in stored), None)
        if name is not None and id(weight) not in values:
            values[id(weight)] = stored[name]
    return values


def _stored(
    offload_dir: str | os.PathLike[str] | None, offload_index: Mapping[str, Any] | None
) -> Mapping[str, torch.Tensor]:
    """What the offload folder holds already; nothing when there is no store in it."""
    if offload_index is None:
        if offload_dir is None or not os.path.isdir(offload_dir):
            return {}
        if not any(name.endswith(".json") for name in os.listdir(offload_dir)):
            return {}
    return OffloadedWeightsLoader(save_folder=offload_dir, index=offload_index)


def _check_values(weights: Sequence[Weight], values: Mapping[int, torch.Tensor]) -> None:
    empty = [w.names[0] for w in weights if w.tensor.is_meta and id(w) not in values]
    if empty:
        raise ModelError(
            f"{list_some(empty)} have no value (they are on meta): load a checkpoint first, as "
            "load_checkpoint_and_dispatch does, or give their values in state_dict"
        )
    for weight in weights:
        value = values.get(id(weight))
        if value is not None and value.shape != weight.tensor.shape:
            raise ModelError(
                f"{weight.names[0]} has shape {tuple(weight.tensor.shape)}, the value given for it "
                f"{tuple(value.shape)}"
            )


def _is_on_disk(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or is_unwritten(tensor)
