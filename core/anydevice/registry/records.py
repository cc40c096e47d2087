"""One backend as the registry knows it, and the questions that it is asked with care.

A backend is a vendor's code: each answer is checked, and a member that raises or returns nonsense
is named with its package and with what it returned. One bad backend must break no other device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Final, Literal

import torch

from anydevice.backend import DeviceBackend, MemoryInfo
from anydevice.errors import BackendError

__all__ = ["BackendRecord", "Status"]

Status = Literal["available", "unavailable", "broken", "duplicate", "excluded"]
#: A plugin that takes longer than this many seconds is named, and not asked again.
_SLOW: Final = 2.0
#: Tests replace it.
_clock = time.perf_counter


@dataclasses.dataclass
class BackendRecord:
    """One backend, or one plugin that gave none.

    Attributes:
        entry_point: its name in the entry-point group; ``"torch"`` for a type that no plugin
            claims.
        distribution: the package that ships it.
        version: that package's version.
        device_type: the torch device type, or the entry-point name when the plugin is broken.
        backend: the object that does the work; None when broken or excluded.
        status: ``available``, ``unavailable`` (no driver or device), ``broken``, ``duplicate`` or
            ``excluded`` (by ``ANYDEVICE_BACKENDS``).
        reason: why it is not available.
        notes: faults of a backend that is used all the same: a slow import, a wrong answer of a
            member, an interface version that differs.
    """

    entry_point: str
    distribution: str
    version: str
    device_type: str
    backend: DeviceBackend | None = None
    status: Status = "unavailable"
    reason: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    #: The `DeviceBackend.torch_package` that was looked for and not found, or failed to import.
    _absent: str | None = dataclasses.field(default=None, repr=False, compare=False)
    #: Why the import of that package failed.
    _import_fault: str = dataclasses.field(default="", repr=False, compare=False)
    #: The answer of a backend that is too slow to be asked twice.
    _slow_count: int | None = dataclasses.field(default=None, repr=False, compare=False)
    #: Notes of which the user was not warned yet.
    _unsaid: list[str] = dataclasses.field(default_factory=list, repr=False, compare=False)

    @property
    def package(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def prepare(self) -> None:
        """Import the vendor's torch package, so that torch knows the device. Never raises.

        A package that is not installed, or whose import fails, is not tried again.
        """
        package = self.backend.torch_package if self.backend is not None else None
        if package is None or package == self._absent or package in sys.modules:
            return
        if not _is_installed(package):
            self._absent = package
            return
        try:
            with self.timed(f"importing {package}"):
                importlib.import_module(package)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's package can fail in any way
            self._absent = package
            self._import_fault = f"importing {package} failed: {type(error).__name__}: {error}"

    def count(self) -> int:
        """How many devices the backend has now; 0 with a `reason` when none, or when it fails."""
        backend = self.backend
        if backend is None or self.status in ("broken", "duplicate", "excluded"):
            return 0
        if self._slow_count is not None:
            return self._slow_count
        package = backend.torch_package
        if package is not None and package == self._absent and package not in sys.modules:
            if self.reason:  # it was asked before
                return 0
        else:
            self.prepare()
        if self._import_fault:
            return self._unavailable(self._import_fault)
        count, fault, slow = self._ask_count(backend)
        self._slow_count = count if slow else None
        self.warn()
        if fault or not count:
            return self._unavailable(fault or _why(backend))
        self.status, self.reason = "available", ""
        return count

    def _ask_count(self, backend: DeviceBackend) -> tuple[int, str, bool]:
        """The count, or 0 and what is wrong; and whether it took long."""
        before = len(self.notes)
        count, fault = 0, ""
        try:
            with self.timed("counting its devices"):
                count = _count(backend)
            if count:
                torch.device(self.device_type)  # raises when torch does not know the type
        except Exception as error:  # noqa: BLE001 - one bad backend must not break another device
            count, fault = 0, _text(error)
        return count, fault, len(self.notes) > before

    def memory_info(self, index: int) -> MemoryInfo:
        """Free and total memory of device ``index`` in bytes, checked.

        Raises:
            BackendError: the backend returned something that is not a `MemoryInfo` of two sizes.
            Exception: whatever the backend raises; NotImplementedError when it cannot tell.
        """
        assert self.backend is not None
        info: Any = self.backend.memory_info(index)
        if not isinstance(info, MemoryInfo) or not (_is_size(info.free) and _is_size(info.total)):
            fault = (
                f"memory_info({index}) of {_name(self.backend)} returned {info!r}, not a "
                "MemoryInfo(free, total) of two sizes in bytes"
            )
            self.note(fault)
            raise BackendError(f"{fault} (package {self.package})")
        return MemoryInfo(
            free=int(info.free), total=int(info.total), shared_with_host=info.shared_with_host
        )

    def ask(self, member: str, *arguments: Any) -> str:
        """The text that a member returns, such as ``device_name``.

        Raises:
            BackendError: it returned something that is not text.
            Exception: whatever the backend raises.
        """
        assert self.backend is not None
        answer = getattr(self.backend, member)(*arguments)
        if not isinstance(answer, str):
            fault = f"{member}() of {_name(self.backend)} returned {answer!r}, not a text"
            self.note(fault)
            raise BackendError(f"{fault} (package {self.package})")
        return answer

    def note(self, fault: str) -> None:
        """Add to `notes`, once."""
        if fault not in self.notes:
            self.notes.append(fault)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Name the package when ``what`` takes more than two seconds."""
        start = _clock()
        try:
            yield
        finally:
            seconds = _clock() - start
            if seconds > _SLOW:
                fault = f"{what} took {seconds:.1f} s"
                self.note(fault)
                self._unsaid.append(fault)

    def warn(self) -> None:
        """Warn, once each, of what `timed` found."""
        while self._unsaid:
            warnings.warn(
                f"the backend of {self.device_type!r} ({self.package}) is slow: "
                f"{self._unsaid.pop()}. ANYDEVICE_BACKENDS=-{self.entry_point} leaves it out.",
                stacklevel=5,
            )

    def _unavailable(self, reason: str) -> int:
        self.status, self.reason = "unavailable", reason
        return 0


def _count(backend: DeviceBackend) -> int:
    # The default of `is_available` asks `device_count`, and would hide a count such as -1.
    inherited = getattr(backend.is_available, "__func__", None) is DeviceBackend.is_available
    here: Any = True if inherited else backend.is_available()
    if not type(here).__name__.startswith("bool"):  # Python's and numpy's
        raise BackendError(f"is_available() of {_name(backend)} returned {here!r}, not a bool")
    if not here:
        return 0
    count: Any = backend.device_count()
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise BackendError(
            f"device_count() of {_name(backend)} returned {count!r}, not a number of devices"
        )
    return count


def _why(backend: DeviceBackend) -> str:
    """The backend's own reason for having no device."""
    reason: Any
    try:
        reason = backend.why_unavailable()
    except Exception as error:  # noqa: BLE001 - the reason for a reason
        reason = _text(error)
    if not isinstance(reason, str):
        return f"why_unavailable() of {_name(backend)} returned {reason!r}, not a text"
    return reason or "no device or driver found"


def _is_size(value: Any) -> bool:
    try:
        return not isinstance(value, (str, bool)) and int(value) >= 0
    except (TypeError, ValueError, OverflowError):
        return False


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"


def _name(backend: DeviceBackend) -> str:
    return type(backend).__name__


def _is_installed(package: str) -> bool:
    """Whether a package could be imported, as far as is known without importing it."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing; or its name is none
        return False
