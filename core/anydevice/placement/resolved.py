"""A placement carried out on this machine: where each weight is stored, and where modules run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn

from anydevice.devices import CPU, DISK, META, Device, DeviceLike, resolve_device
from anydevice.errors import DeviceMapError
from anydevice.placement.device_map import DeviceMap
from anydevice.placement.options import PlacementOptions
from anydevice.placement.placement import Placement
from anydevice.placement.resolve import resolve_device_map
from anydevice.placement.scripted import require_undivided
from anydevice.ties import Weight, list_weights, place_weights
from anydevice.weights import Slot, covering_name, scales_weight

__all__ = ["ResolvedPlacement", "place_model"]


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedPlacement:
    """A placement, its devices resolved, with the weights of a model.

    Attributes:
        placement: the placement.
        main: where offloaded modules run, and the model's own code.
        offload_buffers: whether buffers of offloaded modules are stored with their parameters.
        weights: the distinct weights of the model, each with the device that it is stored on.
    """

    placement: Placement
    main: Device
    offload_buffers: bool
    weights: Sequence[Weight]

    @property
    def devices(self) -> DeviceMap:
        """The map, for looking up names."""
        return self.placement.devices

    @property
    def is_single(self) -> bool:
        """Whether all runs and is stored on one device: nothing has to move after this."""
        devices = set(self.devices.devices)
        if not devices:
            return True
        hosts = {CPU, DISK}
        return (len(devices) == 1 or devices <= hosts) and (
            self.main in devices or (devices <= hosts and self.main == CPU)
        )

    def stored(self, name: str, slot: Slot) -> Device:
        """The device that a tensor is stored on."""
        device = self.devices.lookup(name)
        if device.is_accelerator or not slot.is_buffer or self.offload_buffers:
            return device
        if scales_weight(slot):
            return device
        return self._runs(name)

    def execution(self, name: str) -> Device | None:
        """Where a module runs; None where its parts, in several entries of the map, decide."""
        key = self.devices.key_of(name)
        if key is None:
            return None
        device = self.devices.lookup(key)
        return device if device.is_accelerator else self._runs(name)

    def reserves(self) -> dict[Device, int]:
        """Bytes kept free for offloaded blocks, by device."""
        shares = self.placement.shares
        return {
            device: shares[str(device)].reserve
            for device in (*self.devices.devices, self.main)
            if str(device) in shares and shares[str(device)].reserve
        }

    def _runs(self, name: str) -> Device:
        """Where an offloaded module runs."""
        host_run = self.placement.host_run
        return CPU if host_run and covering_name(name, host_run) is not None else self.main


def place_model(
    model: nn.Module,
    device_map: str | DeviceLike | Mapping[str, DeviceLike],
    options: PlacementOptions,
    main_device: DeviceLike | None = None,
    weights: Sequence[Weight] | None = None,
) -> ResolvedPlacement:
    """Resolve any form of device map for a model on this machine. No weight is moved.

    Args:
        model: the model.
        device_map: see `resolve_device_map`.
        options: see there.
        main_device: where offloaded modules run; by default what the placement says.
        weights: the model's, where the caller has them; their devices are set.

    Raises:
        DeviceMapError: a dict does not cover the model, divides a scripted module, or names meta.
        UnknownDeviceError: a device cannot be read, or is not on this machine.
        BudgetError, DoesNotFitError, ModelError: see `infer_auto_device_map`.
    """
    weights = list_weights(model) if weights is None else weights
    placement = resolve_device_map(model, device_map, options, weights)
    for name, device in placement.devices.entries().items():
        if device == META:
            raise DeviceMapError(f"device_map[{name!r}] is meta, which can hold no weight")
    for device in placement.devices.devices:
        resolve_device(str(device))
    main = _main_device(placement, main_device)
    offload_buffers = options.offload_buffers or placement.offload_buffers
    resolved = ResolvedPlacement(placement, main, offload_buffers, weights)
    require_undivided(model, resolved.execution)
    place_weights(weights, resolved.stored)
    return resolved


def _main_device(placement: Placement, given: DeviceLike | None) -> Device:
    if given is not None:
        main = resolve_device(given)
    elif placement.main_device is not None:
        main = resolve_device(placement.main_device)  # also where only offloaded blocks run on it
    elif placement.host_run and not placement.ahead:
        main = CPU
    else:
        main = placement.devices.main_device
    return CPU if main == DISK else main
