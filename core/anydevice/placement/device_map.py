"""Reading a device map: the device of a name is that of its longest prefix in the map."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.errors import DeviceMapError, UnknownDeviceError
from anydevice.placement.placed import Placed
from anydevice.text import list_some
from anydevice.weights import iter_slots

__all__ = ["DeviceMap", "check_device_map", "clean_device_map", "grouped", "require_cover"]


class DeviceMap:
    """A mapping of names to devices, read once.

    Args:
        device_map: module or tensor names to devices in any spelling. ``""`` is the whole model.

    Raises:
        UnknownDeviceError: a device cannot be read; the message names its key.
        DeviceMapError: it is not such a mapping.

    Example:
        >>> from anydevice.placement import DeviceMap
        >>> str(DeviceMap({"": "cpu", "head": "disk"}).lookup("head.weight"))
        'disk'
    """

    def __init__(self, device_map: Mapping[str, DeviceLike]) -> None:
        if not isinstance(device_map, Mapping):
            raise DeviceMapError(
                f"device_map is {device_map!r}; it must be a dict of module name to device"
            )
        self._entries: dict[str, Device] = {}
        self._keys: dict[str, str | None] = {}  # of modules that were asked for
        for name, device in device_map.items():
            if not isinstance(name, str):
                raise DeviceMapError(f"device_map has the key {name!r}; keys are module names")
            try:
                self._entries[name] = parse_device(device)
            except UnknownDeviceError as error:
                raise UnknownDeviceError(f"device_map[{name!r}]: {error}") from None

    def entries(self) -> dict[str, Device]:
        """The names of the map with their devices, in its order."""
        return dict(self._entries)

    @property
    def devices(self) -> list[Device]:
        """The devices of the map, each once, in its order."""
        return list(dict.fromkeys(self._entries.values()))

    @property
    def main_device(self) -> Device:
        """Where offloaded modules are run: the first accelerator of the map, else the host."""
        return next((device for device in self.devices if device.is_accelerator), CPU)

    def key_of(self, name: str) -> str | None:
        """The entry that covers a module or tensor: its longest prefix; None when there is none."""
        if name in self._entries:
            return name
        if not name:
            return None
        # Tensors come module by module: their modules' keys are worth remembering.
        parent = name.rpartition(".")[0]
        try:
            return self._keys[parent]
        except KeyError:
            key = self._keys[parent] = self.key_of(parent)
            return key

    def lookup(self, name: str) -> Device:
        """The device of a module or tensor.

        Raises:
            DeviceMapError: the map does not cover it.
        """
        key = self.key_of(name)
        if key is None:
            raise DeviceMapError(
                f"device_map gives no device for {name!r}; it names {_some(self._entries)}"
            )
        return self._entries[key]


def check_device_map(model: nn.Module, device_map: Mapping[str, DeviceLike]) -> None:
    """Make sure that a device map covers a model. Names that match nothing in it are warned of.

    Args:
        model: the model.
        device_map: module or tensor names to devices.

    Raises:
        DeviceMapError: parameters or buffers have no device; the message lists the first of them.
        UnknownDeviceError: a device cannot be read.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import check_device_map
        >>> check_device_map(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu"})
    """
    lookup = DeviceMap(device_map)
    require_cover(model, lookup, {name: lookup.key_of(name) for name, _ in iter_slots(model)})


def require_cover(model: nn.Module, lookup: DeviceMap, keys: Mapping[str, str | None]) -> None:
    """`check_device_map`, where ``keys`` has the entry of each tensor's name, or None for none."""
    missing = [name for name, key in keys.items() if key is None]
    used = set(keys.values())
    stray = [key for key in lookup.entries() if key not in used and not _exists(model, key)]
    said = f"device_map names {_some(stray)}, which match nothing in {type(model).__name__}"
    if missing:
        raise DeviceMapError(
            f"device_map gives no device for {_some(missing)} of {type(model).__name__}. "
            + (f"And {said}. " if stray else "")
            + "Name them or a module that holds them; '' stands for the whole model."
        )
    if stray:
        warnings.warn(said, stacklevel=3)


def _exists(model: nn.Module, name: str) -> bool:
    """Whether a name that covers no tensor is a module (or an empty slot) all the same."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return False
    return not name or any(leaf in t for t in (owner._modules, owner._parameters, owner._buffers))


def _some(names: Iterable[str]) -> str:
    return list_some([repr(name) for name in names])


def grouped(placed: Sequence[Placed], keys: Mapping[str, int | str]) -> dict[str, int | str]:
    """The shortest map of placed blocks: modules whose blocks are all on one device are one entry.

    ``keys`` has the user's spelling of each canonical device name.
    """
    #: Each prefix's only device; "" (no device's name) where there are several.
    only: dict[str, str] = {}
    for p in placed:
        if p.size:
            for prefix in _prefixes(p.name):
                if only.setdefault(prefix, p.device) != p.device:
                    only[prefix] = ""
    result = {}
    for p in placed:  # what holds nothing goes along with whatever covers it
        name = next((x for x in _prefixes(p.name) if only.get(x, p.device)), p.name)
        result[name] = keys[only.get(name) or p.device]
    return result


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Put one entry in place of all entries of a module that is on one device, at any depth.

    Args:
        device_map: module or weight names to devices; it is changed.
        module_name: where to begin; the whole model by default.

    Returns:
        The same mapping.

    Example:
        >>> from anydevice.utils import clean_device_map
        >>> clean_device_map({"a.0": 0, "a.1": 0, "b": 1})
        {'b': 1, 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    devices = [device_map[name] for name in inside]
    if len({parse_device(device) for device in devices}) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices[0]
        return device_map
    depth = prefix.count(".") + 1
    children = dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside)
    for child in children:
        if child and child != module_name and any(n.startswith(f"{child}.") for n in inside):
            clean_device_map(device_map, child)
    return device_map


def _prefixes(name: str) -> list[str]:
    """``"a.b"`` gives ``["", "a", "a.b"]``."""
    prefixes, end = [""], name.find(".")
    while end != -1:
        prefixes.append(name[:end])
        end = name.find(".", end + 1)
    return [*prefixes, name] if name else prefixes
