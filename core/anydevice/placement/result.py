"""What the planner answers: a device map that can be asked about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from anydevice.devices import DeviceLike, parse_device

__all__ = ["Placed", "Placement", "Share"]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One block and where it went.

    Attributes:
        name: full name of the module, parameter or buffer; ``""`` is the whole model.
        kind: its class.
        size: bytes of its tensors.
        device: canonical name of its device.
        tied_to: the block that it was put beside, as it is mostly tied weights; else None.
        visit: bytes that it brings when it visits the executing device.
    """

    name: str
    kind: str
    size: int
    device: str
    tied_to: str | None = None
    visit: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One device's part of a placement.

    Attributes:
        key: the device as the user spells it.
        budget: bytes that it may hold; None is without limit.
        used: bytes that rest on it.
        room: bytes kept free for blocks that visit.
    """

    key: int | str
    budget: int | None
    used: int
    room: int = 0

    @property
    def free(self) -> int | None:
        """Bytes of the budget that are neither used nor kept; None without limit."""
        return None if self.budget is None else self.budget - self.used - self.room


class Placement(dict[str, Any]):
    """A device map (a real dict of name to device) that also knows why it is as it is.

    Its values are ints and strings, as the user spelled the devices; so it is JSON-able, and can be
    used wherever a dict is. `copy.deepcopy` and pickle keep all of it; ``dict(placement)`` is the
    plain map.

    Attributes:
        model: the model's class name.
        blocks: every block in execution order with its device.
        shares: canonical device name to what it holds; fastest first.
        main_device: the device, as spelled, on which offloaded blocks run; None when nothing is
            offloaded, or when no accelerator has room for them and all runs on the host.
        ahead: how many visiting blocks `room` is for: 2 when the next is fetched ahead, 0 for none.
        whole: whether blocks visit whole; else those too large come module by module.
        host_run: names of offloaded blocks of which even one module is too large for any
            accelerator: they are best run on the host.
        offload_buffers: whether buffers of offloaded blocks rest with their parameters.
    """

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
    ) -> None:
        super().__init__(device_map)
        self.model = model
        self.blocks = list(blocks)
        self.shares = dict(shares or {})
        self.main_device = main_device
        self.ahead = ahead
        self.whole = whole
        self.host_run = list(host_run)
        self.offload_buffers = offload_buffers

    @property
    def room(self) -> dict[str, int]:
        """Bytes kept free for visiting blocks, by canonical device name."""
        return {device: share.room for device, share in self.shares.items() if share.room}

    @property
    def budgets(self) -> dict[int | str, int | None]:
        """The budgets planned with, headroom taken off; None is without limit."""
        return {share.key: share.budget for share in self.shares.values()}

    def bytes_on(self, device: DeviceLike) -> int:
        """Bytes that rest on a device, tied weights once.

        Args:
            device: in any spelling; ``"disk"`` too.

        Raises:
            UnknownDeviceError: it cannot be read.
        """
        share = self.share_of(device)
        return share.used if share is not None else 0

    def share_of(self, device: DeviceLike) -> Share | None:
        """A device's part; None when the placement was made without it."""
        for share in self.shares.values():  # a plan for another machine: its own spelling counts
            if share.key == device and not isinstance(device, bool):
                return share
        return self.shares.get(str(parse_device(device)))

    def explain(self) -> str:
        """Tell in words why each block went where it did."""
        from anydevice.placement.explain import explain

        return explain(self)

    def table(self) -> str:
        """Write the devices, what they hold and what is left as a table of text."""
        from anydevice.placement.explain import table

        return table(self)

    def to_svg(self) -> str:
        """Draw the devices as bars with the blocks in order: one self-contained SVG."""
        from anydevice.placement.picture import draw

        return draw(self)

    def _repr_svg_(self) -> str:
        """Notebooks show the picture."""
        return self.to_svg()
