"""The backend that is being checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo
from anydevice.registry import BackendRecord
from anydevice_conformance.outcomes import no_hardware, not_claimed

__all__ = ["DECLARED", "Subject"]

_HOST = "cpu"
#: The attributes that a backend declares, and that stay as they are.
DECLARED: Final = (
    "device_type",
    "interface_version",
    "priority",
    "kind",
    "torch_package",
    "capabilities",
    "collective_backend",
    "visible_devices_env",
    "out_of_memory_words",
)


@dataclasses.dataclass
class Subject:
    """A backend under test, and the few things that nearly every check does with it.

    Attributes:
        record: what the registry says of it.
        backend: the object itself.
        quick: whether to do little.
        assumed: capabilities that are not claimed and are tried all the same.
        seed: of what is generated.
        count: how many examples of each law are tried; None for its ordinary number.
        shrinking: whether a counterexample is made smaller.
        declared: what the backend declares, once and for all.
    """

    record: BackendRecord
    backend: DeviceBackend
    quick: bool = False
    assumed: frozenset[str] = frozenset()
    seed: int = 0
    count: int | None = None
    shrinking: bool = True
    declared: dict[str, object] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Note what the backend declares before anything is asked of it."""
        for name in DECLARED:
            with contextlib.suppress(Exception):  # a check of its own says so
                self.declared[name] = getattr(self.backend, name)

    @contextlib.contextmanager
    def replacing(self, members: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Have these called in place of the backend's own members of their names meanwhile."""
        own = vars(self.backend)
        before = {name: own[name] for name in members if name in own}
        own.update(members)
        try:
            yield
        finally:
            for name in members:
                own.pop(name, None)
            own.update(before)

    def examples(self, ordinary: int) -> int:
        """How many examples of a law to try, where an ordinary run tries ``ordinary``."""
        return self.count or max(5, ordinary // (7 if self.quick else 1))

    @property
    def type(self) -> str:
        """The device type."""
        return self.backend.device_type

    @property
    def module(self) -> object | None:
        """The device's module; None where there is none, or the device is the host."""
        try:
            return None if self.is_host else self.backend.module
        except Exception:  # noqa: BLE001 - a device need not have one
            return None

    @property
    def is_host(self) -> bool:
        """Whether the device is the host itself."""
        return self.type == _HOST

    @property
    def capabilities(self) -> Capabilities:
        """What is claimed, and what is assumed."""
        claimed = self.backend.capabilities
        if not self.assumed:
            return claimed
        return dataclasses.replace(claimed, **dict.fromkeys(self.assumed, True))

    @functools.cached_property
    def indices(self) -> list[int]:
        """The indices of the devices there are; none when the backend cannot say."""
        try:
            return list(range(self.backend.device_count())) if self.backend.is_available() else []
        except Exception:  # noqa: BLE001 - the checks of discovery find it again and say so
            return []

    def why_none(self) -> str:
        """Why there is no device, in the backend's words; empty when it cannot say."""
        try:
            return str(self.backend.why_unavailable())
        except Exception:  # noqa: BLE001 - as above
            return ""

    @functools.cached_property
    def infers(self) -> bool:
        """Whether the device works under `torch.inference_mode`."""
        try:
            with torch.inference_mode():
                return bool((torch.ones(2, device=self.device(self.indices[0])) + 1).sum() == 4)
        except Exception:  # noqa: BLE001 - it does not; a check of its own says so
            return False

    def inference(self) -> contextlib.AbstractContextManager[object]:
        """The mode in which a forward pass runs: inference mode, where the device works in it."""
        return torch.inference_mode() if self.infers else torch.no_grad()

    @functools.cached_property
    def strided(self) -> bool:
        """Whether tensors on the device have strides: a transposed view is no copy."""
        try:
            there = torch.zeros(2, 3, device=self.device(self.indices[0]))
            there.t()[0, 1] = 1.0
            return there.t().stride() == (1, 3) and float(there[1, 0]) == 1.0
        except Exception:  # noqa: BLE001 - it has none
            return False

    def told(self, index: int) -> MemoryInfo | None:
        """What the backend says of a device's memory; None where it does not say."""
        try:
            found = self.backend.memory_info(index)
            return MemoryInfo(free=int(found.free), total=int(found.total))
        except Exception:  # noqa: BLE001 - the checks of memory say what is wrong with it
            return None

    def room(self, index: int) -> int:
        """Bytes that a check may take on a device, whether it tells its memory or not."""
        told = self.told(index)
        return told.free if told is not None else 256 << 20

    @property
    def ends(self) -> list[int]:
        """The first and the last index: where a check is run once a device. Quickly: the last."""
        if self.quick:
            return self.indices[-1:]
        return sorted({self.indices[0], self.indices[-1]}) if self.indices else []

    def pair(self) -> tuple[int, int]:
        """Two indices; ends the check where there is one device."""
        if len(self.indices) < 2:
            no_hardware(f"needs two devices of type {self.type!r}; there is one")
        return self.indices[0], self.indices[-1]

    def both_ways(self) -> list[tuple[int, int]]:
        """The `pair` in both orders."""
        one, other = self.pair()
        return [(one, other), (other, one)]

    def supported(self, *dtypes: torch.dtype) -> list[torch.dtype]:
        """Those of ``dtypes`` that the backend claims."""
        return [dtype for dtype in dtypes if self.backend.supports_dtype(dtype)]

    def need_dtype(self, dtype: torch.dtype) -> None:
        """End the check where the backend does not claim ``dtype``."""
        if not self.supported(dtype):
            not_claimed(f"{dtype} is not claimed")

    def device(self, index: int) -> torch.device:
        """The `torch.device` of an index."""
        return torch.device(_HOST) if self.is_host else torch.device(self.type, index)

    def is_on(self, tensor: torch.Tensor, index: int) -> bool:
        """Whether ``tensor`` is on device ``index``."""
        return tensor.device.type == self.type and (tensor.device.index or 0) == index

    def put(self, tensor: torch.Tensor, index: int, *, non_blocking: bool = False) -> torch.Tensor:
        """Move ``tensor`` to device ``index`` by the backend."""
        return self.backend.move(tensor, self.device(index), non_blocking=non_blocking)

    def fetch(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Move ``tensor`` to the host by the backend."""
        return self.backend.move(tensor, torch.device(_HOST), non_blocking=non_blocking)

    def memory(self, index: int) -> MemoryInfo:
        """Measure; ends the check where the backend says that it cannot."""
        try:
            return self.backend.memory_info(index)
        except NotImplementedError as error:
            not_claimed(f"memory_info does not answer: {error}")

    def allocated(self, index: int) -> int:
        """Bytes in tensors; ends the check where the backend says that it cannot."""
        try:
            return self.backend.memory_allocated(index)
        except NotImplementedError as error:
            not_claimed(f"memory_allocated does not answer: {error}")

    def synchronize_all(self) -> None:
        """Wait for every device."""
        for index in self.indices:
            self.backend.synchronize(index)
