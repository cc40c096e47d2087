"""How a model is to run: what hooks need to know of its placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from anydevice.devices import Device
from anydevice.weights import Slot

__all__ = ["ExecutionPlan"]


@dataclasses.dataclass
class ExecutionPlan:
    """How a model is to run.

    Attributes:
        execution: a module's full name to where it runs; None for one whose parts decide.
        main: where a module runs whose parts decide, as far as its own weights are concerned.
        blocks: full names of modules that are loaded as a whole.
        preload: class names of modules that are loaded as a whole however large.
        stored: full name and slot of a weight to where it is stored by plan.
        limits: most bytes of one group, by device; no limit by default.
        skip_keys: see `AlignDevicesHook`.
        io_same_device: whether the outermost module's output follows its input.
        prefix: the outermost module's full name.
        resident_buffers: names, below the outermost module, of buffers of offloaded modules that
            are where these run.
    """

    execution: Callable[[str], Device | None]
    main: Device
    blocks: Collection[str] = ()
    preload: Collection[str] = ()
    stored: Callable[[str, Slot], Device] | None = None
    limits: Mapping[Device, int] = dataclasses.field(default_factory=dict)
    skip_keys: str | list[str] | None = None
    io_same_device: bool = True
    prefix: str = ""
    resident_buffers: Collection[str] = ()
