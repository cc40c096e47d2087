"""The planner's result: a device map that can be asked about itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from anydevice.devices import Device, DeviceLike, parse_device
from anydevice.errors import DeviceMapError, FrozenPlacementError
from anydevice.placement.counting import bytes_by_device, needed_reserve
from anydevice.placement.device_map import DeviceMap, grouped
from anydevice.placement.explain import explain, table
from anydevice.placement.pictures import Pictures
from anydevice.placement.placed import Facts, Share
from anydevice.text import list_some
from anydevice.weights import covering_name

__all__ = ["Placement"]


class Placement(Pictures, dict[str, Any]):
    """A device map (a dict of name to device) that also knows why it is as it is.

    Its values are ints and strings, as the user spelled the devices; so it is JSON-able, and can be
    used wherever a dict is read. It is frozen: `replace` returns a changed one, and
    ``dict(placement)`` is the plain map, to edit and to pass as any other device map.
    `copy.deepcopy` and pickle keep all of it.

    Attributes:
        model: the model's class name.
        blocks: every block in execution order with its device.
        shares: canonical device name to what it holds; fastest first.
        main_device: the device, as spelled, on which offloaded blocks run; None when nothing is
            offloaded, or when no accelerator has memory for them and all runs on the host.
        ahead: how many offloaded blocks fit in `reserve`: 2 when the next one is prefetched, 0 for
            none.
        whole: whether offloaded blocks are loaded whole; else too large ones module by module.
        host_run: names of offloaded blocks of which even one module is too large for any
            accelerator: they run on the host.
        offload_buffers: whether buffers of offloaded blocks are stored with their parameters.
        sizes: bytes of each distinct tensor of the model, in its order.
        is_given: whether the user named the devices.

    Example:
        >>> from torch import nn
        >>> from anydevice import infer_auto_device_map
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> placement = infer_auto_device_map(model, max_memory={"cpu": "1MiB"})
        >>> dict(placement), placement.bytes_on("cpu")
        ({'': 'cpu'}, 160)
        >>> placement.replace({"1": "disk"}).bytes_on("disk")
        80
    """

    def __init__(self, device_map: Mapping[str, int | str], **facts: Any) -> None:
        dict.__init__(self, device_map)
        Facts.__init__(self, **facts)

    # ------------------------------------------------------------------ the facts

    @functools.cached_property
    def devices(self) -> DeviceMap:
        """The map with its devices read, for looking up names."""
        return DeviceMap(self)

    @property
    def reserve(self) -> dict[int | str, int]:
        """Bytes kept free for offloaded blocks, by device as spelled."""
        return {share.key: share.reserve for share in self.shares.values() if share.reserve}

    @property
    def budgets(self) -> dict[int | str, int | None]:
        """The budgets planned with, headroom taken off; None is without limit."""
        return {share.key: share.budget for share in self.shares.values()}

    def bytes_on(self, device: DeviceLike) -> int:
        """Bytes that are stored on a device, tied weights once.

        Args:
            device: in any spelling; ``"disk"`` too.

        Raises:
            UnknownDeviceError: it cannot be read.
        """
        share = self.share_of(device)
        return share.used if share is not None else 0

    def share_of(self, device: DeviceLike) -> Share | None:
        """What a device holds; None when the placement was made without it."""
        for share in self.shares.values():  # a plan for another machine: its own spelling counts
            if share.key == device and not isinstance(device, bool):
                return share
        return self.shares.get(str(parse_device(device)))

    def explain(self) -> str:
        """Say in words why each block is where it is."""
        return explain(self)

    def table(self) -> str:
        """Return the devices, what they hold and what is left as a table of text."""
        return table(self)

    # ------------------------------------------------------------------ changing

    def replace(self, changes: Mapping[str, DeviceLike]) -> Placement:
        """Return a placement with some blocks on other devices; this one stays as it is.

        Bytes and reserves are counted again. Budgets are not enforced: a share's ``free`` below 0
        says that one is exceeded.

        Args:
            changes: names of blocks, or of modules that consist of blocks, to devices.

        Raises:
            DeviceMapError: a name is none of the placement's blocks and holds none.
            UnknownDeviceError: a device cannot be read.
        """
        moved: dict[str, Device] = {}
        keys = {name: share.key for name, share in self.shares.items()}
        for name, spelling in changes.items():
            device = parse_device(spelling)
            keys.setdefault(str(device), spelling if isinstance(spelling, int) else str(spelling))
            inside = [p.name for p in self.blocks if covering_name(p.name, (name,)) is not None]
            if not inside:
                raise DeviceMapError(
                    f"{name!r} is no block of this placement, whose blocks are "
                    f"{list_some([repr(p.name) for p in self.blocks])}. To divide a block, pass a "
                    f"plain dict as device map: {{**placement, {name!r}: {spelling!r}}}"
                )
            moved.update(dict.fromkeys(inside, device))
        blocks = tuple(
            dataclasses.replace(p, device=str(moved[p.name]), tied_to=None, is_given=True)
            if p.name in moved
            else p
            for p in self.blocks
        )
        host_run = tuple(name for name in self.host_run if name not in moved)
        main, reserve, ahead = needed_reserve(blocks, host_run, self, keys)
        used = bytes_by_device(blocks, self.sizes, main, self.offload_buffers)
        order = [*self.shares, *(d for d in used if d not in self.shares)]
        shares = {
            device: Share(
                keys[device],
                self.shares[device].budget if device in self.shares else None,
                used.get(device, 0),
                reserve if device == main else 0,
            )
            for device in order
        }
        device_map = (
            {p.name: keys[p.device] for p in blocks} if self.is_given else grouped(blocks, keys)
        )
        return self.changed(
            device_map,
            blocks=blocks,
            shares=shares,
            main_device=None if main is None else keys[main],
            ahead=ahead,
            host_run=host_run,
        )

    def changed(self, device_map: Mapping[str, int | str], **facts: Any) -> Placement:
        """Return a placement with another map and some other facts; nothing is counted."""
        return Placement(device_map, **{**self._all_facts(), **facts})

    def _all_facts(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(Facts)}
        return {**facts, "shares": dict(self.shares)}  # a read-only view cannot be pickled

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise FrozenPlacementError(
            "a Placement is frozen, as its bytes would no longer be true: "
            "placement.replace({'name': device}) returns a changed one, and dict(placement) is a "
            "plain device map to edit"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    __setattr__ = __delattr__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> Placement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dict(self), self._all_facts())


def _restore(device_map: dict[str, int | str], facts: dict[str, Any]) -> Placement:
    return Placement(device_map, **facts)
