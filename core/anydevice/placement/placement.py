"""The planner's result: a device map that can be asked about itself."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from anydevice.devices import Device, DeviceLike, parse_device
from anydevice.errors import DeviceMapError, FrozenPlacementError
from anydevice.placement.counting import bytes_by_device, needed_reserve
from anydevice.placement.device_map import DeviceMap, grouped
from anydevice.placement.explain import explain, table
from anydevice.placement.pictures import Pictures
from anydevice.placement.placed import Facts, Placed, Share
from anydevice.text import list_some

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

    Example::

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        placement = infer_auto_device_map(model, max_memory={"cpu": 10**6})
        changed = placement.replace({"1": "disk"})
        assert changed.bytes_on("disk") == 80

    Example:
        >>> from torch import nn
        >>> from anydevice import infer_auto_device_map
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> placement = infer_auto_device_map(model, max_memory={"cpu": "1MiB"})
        >>> dict(placement), placement.bytes_on("cpu")
        ({'': 'cpu'}, 160)
    """

    __slots__ = ("_devices", "_facts")

    def __init__(
        self,
        device_map: Mapping[str, int | str],
        *,
        model: str = "",
        blocks: Sequence[Placed] = (),
        shares: Mapping[str, Share] | None = None,
        main_device: int | str | None = None,
        ahead: int = 0,
        whole: bool = True,
        host_run: Sequence[str] = (),
        offload_buffers: bool = False,
        sizes: Sequence[int] = (),
        is_given: bool = False,
    ) -> None:
        super().__init__(device_map)
        facts = Facts(
            model,
            tuple(blocks),
            types.MappingProxyType(dict(shares or {})),
            main_device,
            ahead,
            whole,
            tuple(host_run),
            offload_buffers,
            tuple(sizes),
            is_given,
        )
        object.__setattr__(self, "_facts", facts)
        object.__setattr__(self, "_devices", None)

    # ------------------------------------------------------------------ the facts

    _facts: Facts

    @property
    def model(self) -> str:
        """The model's class name."""
        return self._facts.model

    @property
    def blocks(self) -> tuple[Placed, ...]:
        """Every block in execution order with its device."""
        return self._facts.blocks

    @property
    def shares(self) -> Mapping[str, Share]:
        """Canonical device name to what it holds; fastest first."""
        return self._facts.shares

    @property
    def main_device(self) -> int | str | None:
        """The device, as spelled, on which offloaded blocks run; see the class."""
        return self._facts.main_device

    @property
    def ahead(self) -> int:
        """How many offloaded blocks fit in `reserve`."""
        return self._facts.ahead

    @property
    def whole(self) -> bool:
        """Whether offloaded blocks are loaded whole."""
        return self._facts.whole

    @property
    def host_run(self) -> tuple[str, ...]:
        """Names of offloaded blocks that run on the host."""
        return self._facts.host_run

    @property
    def offload_buffers(self) -> bool:
        """Whether buffers of offloaded blocks are stored with their parameters."""
        return self._facts.offload_buffers

    @property
    def devices(self) -> DeviceMap:
        """The map with its devices read, for looking up names."""
        if self._devices is None:
            object.__setattr__(self, "_devices", DeviceMap(self))
        assert self._devices is not None
        return self._devices

    _devices: DeviceMap | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each distinct tensor of the model, in its order."""
        return self._facts.sizes

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
        return explain(self._facts)

    def table(self) -> str:
        """Return the devices, what they hold and what is left as a table of text."""
        return table(self._facts)

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
        facts = self._facts
        moved: dict[str, Device] = {}
        keys = {name: share.key for name, share in facts.shares.items()}
        for name, spelling in changes.items():
            device = parse_device(spelling)
            keys.setdefault(str(device), spelling if isinstance(spelling, int) else str(spelling))
            inside = [p.name for p in facts.blocks if _holds(name, p.name)]
            if not inside:
                raise DeviceMapError(
                    f"{name!r} is no block of this placement, whose blocks are "
                    f"{list_some([repr(p.name) for p in facts.blocks])}. To divide a block, pass a "
                    f"plain dict as device map: {{**placement, {name!r}: {spelling!r}}}"
                )
            moved.update(dict.fromkeys(inside, device))
        blocks = tuple(
            dataclasses.replace(p, device=str(moved[p.name]), tied_to=None, is_given=True)
            if p.name in moved
            else p
            for p in facts.blocks
        )
        host_run = tuple(name for name in facts.host_run if name not in moved)
        main, reserve, ahead = needed_reserve(blocks, host_run, facts, keys)
        used = bytes_by_device(blocks, facts.sizes, main, facts.offload_buffers)
        order = [*facts.shares, *(d for d in used if d not in facts.shares)]
        shares = {
            device: Share(
                keys[device],
                facts.shares[device].budget if device in facts.shares else None,
                used.get(device, 0),
                reserve if device == main else 0,
            )
            for device in order
        }
        device_map = (
            {p.name: keys[p.device] for p in blocks} if facts.is_given else grouped(blocks, keys)
        )
        return Placement(
            device_map,
            model=facts.model,
            blocks=blocks,
            shares=shares,
            main_device=None if main is None else keys[main],
            ahead=ahead,
            whole=facts.whole,
            host_run=host_run,
            offload_buffers=facts.offload_buffers,
            sizes=facts.sizes,
            is_given=facts.is_given,
        )

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
        facts = {f.name: getattr(self._facts, f.name) for f in dataclasses.fields(Facts)}
        return _restore, (dict(self), {**facts, "shares": dict(self.shares)})


def _restore(device_map: dict[str, int | str], facts: dict[str, Any]) -> Placement:
    return Placement(device_map, **facts)


def _holds(name: str, block: str) -> bool:
    """Whether a name is a block's or that of a module around it."""
    return not name or block == name or block.startswith(f"{name}.")
