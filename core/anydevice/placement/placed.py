"""The facts of a placement: which block is where, and what each device holds."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence

__all__ = ["Facts", "Placed", "Share"]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One block and its device.

    Attributes:
        name: full name of the module, parameter or buffer; ``""`` is the whole model.
        kind: its class.
        size: bytes of its tensors.
        device: canonical name of its device.
        tied_to: the block that it is placed with, as it is mostly tied weights; else None.
        onload: bytes that it needs on the executing device when it runs there and is stored
            elsewhere.
        is_given: whether the user named its device.
        parameters: the numbers of its parameters in the model, each once.
        buffers: the same, of its buffers.
    """

    name: str
    kind: str
    size: int
    device: str
    tied_to: str | None = None
    onload: int = 0
    is_given: bool = False
    parameters: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    buffers: tuple[int, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one device holds.

    Attributes:
        key: the device as the user spells it.
        budget: bytes that it may hold; None is without limit.
        used: bytes that are stored on it.
        reserve: bytes kept free for offloaded blocks that run on it.
    """

    key: int | str
    budget: int | None
    used: int
    reserve: int = 0

    @property
    def free(self) -> int | None:
        """Bytes of the budget that are neither used nor reserved; None without limit."""
        return None if self.budget is None else self.budget - self.used - self.reserve


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Facts:
    """All that a placement knows besides its device map; see `Placement`."""

    model: str = ""
    blocks: Sequence[Placed] = ()
    shares: Mapping[str, Share] = dataclasses.field(default_factory=dict)
    main_device: int | str | None = None
    ahead: int = 0
    whole: bool = True
    host_run: Sequence[str] = ()
    offload_buffers: bool = False
    sizes: Sequence[int] = ()
    is_given: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "host_run", "sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "shares", types.MappingProxyType(dict(self.shares)))
