"""Install the simulator, shape it, and read what happened on it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch.utils import backend_registration

from . import collectives, device_module
from .build import SimulatorUnavailableError, load_extension
from .options import Memory, Mode, Options, parse_options

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "TraceRecord",
    "advance_clock",
    "clock_us",
    "configure",
    "counters",
    "drain",
    "install",
    "install_from_env",
    "installed_name",
    "is_installed",
    "mode",
    "pinned_bytes",
    "reset_counters",
    "trace",
]

#: Asks for a simulated machine: ``1``, or ``devices=2,memory=64MiB:1GiB,mode=lazy``.
ENVIRONMENT_VARIABLE: Final = "ANYDEVICE_SIMULATOR"

_lock = threading.Lock()
_installed_name: str | None = None
_mode: Mode = "lazy"


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """A piece of work that ran.

    Attributes:
        kind: ``"kernel"``, ``"h2d"``, ``"h2d_pageable"``, ``"d2h"``, ``"d2h_pageable"``, ``"p2p"``
            or ``"d2d"`` (a copy within a device).
        device: the index of the device whose stream ran it.
        stream: the stream's id; 0 is the default stream.
        bytes: how many it copied; 0 for a kernel.
        start_us: when it began, in microseconds on the simulated clock.
        end_us: when it ended.
    """

    kind: str
    device: int
    stream: int
    bytes: int
    start_us: float
    end_us: float

    def overlaps(self, other: TraceRecord) -> bool:
        """Say whether there was a moment at which both ran."""
        return self.start_us < other.end_us and other.start_us < self.end_us


def install(name: str = "sim") -> None:
    """Make the devices ``name:0``, ``name:1``, ... known to torch, with default options.

    Once a process; later calls with the same name change nothing. torch has one place for a
    device from outside, so no second name and no other such device can be used next to it.

    Args:
        name: the device type. ``"npu"`` makes the simulator answer to a vendor's name, so that
            the vendor's backend runs on it.

    Raises:
        SimulatorUnavailableError: it cannot be compiled here, or the place is taken.
    """
    _install(name, Options())


def _install(name: str, options: Options) -> None:
    global _installed_name, _mode
    with _lock:
        if _installed_name == name:
            return
        if _installed_name is not None:
            raise SimulatorUnavailableError(
                f"The simulator plays {_installed_name!r} in this process and cannot play "
                f"{name!r}, too. Start another process for it."
            )
        _take_place(name)
        native = load_extension()
        native.configure(**options.native_arguments())
        device_module.bind(name, native)
        torch._register_device_module(name, device_module)  # type: ignore[no-untyped-call]
        sys.modules[f"torch.{name}"] = device_module
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        os.register_at_fork(before=native.settle_before_fork, after_in_child=_renew_thread_pool)
        collectives.register(name)
        _installed_name, _mode = name, options.mode


def _renew_thread_pool() -> None:
    """Replace torch's thread pool in a forked child, before a second thread runs there.

    torch replaces it at the first use, without a lock. Autograd starts a thread for each device,
    each thread uses the pool first of all, and the loser of that race aborts the process (torch
    2.13, ``at::set_num_threads``: "Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def _take_place(name: str) -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", name) or hasattr(torch, name):
        raise SimulatorUnavailableError(
            f"torch's place for an outside device is taken by {taken!r} in this process, so the "
            f"simulator cannot play {name!r}. Start a process that does not import that device's "
            "package (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from importing it)."
        )
    backend_registration.rename_privateuse1_backend(name)


def install_from_env() -> bool:
    """Install and configure what `ENVIRONMENT_VARIABLE` asks for, if it asks; return whether.

    Where the simulator is installed already it is left as it is. Values that mean no are unset,
    empty and ``0``.

    Raises:
        ValueError: the variable cannot be read.
        SimulatorUnavailableError: as `install`.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    if not is_installed():
        try:
            options = parse_options(text)
        except ValueError as error:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={text}: {error}") from error
        _install("sim", options)
    return True


def is_installed() -> bool:
    """Say whether `install` has been called in this process."""
    return _installed_name is not None


def installed_name() -> str | None:
    """The device type that the simulator plays, or None."""
    return _installed_name


def configure(
    devices: int = 2,
    memory: Memory | Sequence[Memory] = "1GiB",
    mode: Mode = "lazy",
    *,
    seed: int = 0,
    h2d: float = Options.h2d,
    d2h: float = Options.d2h,
    p2p: float = Options.p2p,
    hbm: float = Options.hbm,
    copy_latency: float = Options.copy_latency,
    kernel: float = Options.kernel,
    launch: float = Options.launch,
    poison: bool = True,
    async_kernels: bool = True,
    pinned_limit: Memory | None = None,
) -> None:
    """Make a new machine; see `Options` for what each argument means and its unit.

    Queued work is run first and its errors forgotten. Then the cache is empty; clock, counters and
    statistics start again; and this thread's current device is 0. Options that are not named get
    their defaults. Tensors of the old machine live on, and count against the new caps. Installs
    the simulator if it is not.
    """
    options = Options(
        devices=devices,
        memory=memory,
        mode=mode,
        seed=seed,
        h2d=h2d,
        d2h=d2h,
        p2p=p2p,
        hbm=hbm,
        copy_latency=copy_latency,
        kernel=kernel,
        launch=launch,
        poison=poison,
        async_kernels=async_kernels,
        pinned_limit=pinned_limit,
    )
    global _mode
    if not is_installed():
        install()
    device_module.native().configure(**options.native_arguments())
    _mode = options.mode


def mode() -> Mode:
    """When queued work runs on the machine that `configure` made last."""
    return _mode


def counters(index: int) -> dict[str, int]:
    """What device ``index`` has done since `configure` or `reset_counters`.

    Keys: ``kernels``, ``host_syncs``; ``h2d_copies``, ``h2d_bytes``, and the same for ``d2h``,
    ``p2p`` (counted at the source) and ``d2d``; ``allocs`` and ``frees`` (blocks asked for and
    given back by tensors), ``device_allocs`` and ``device_frees`` (memory taken from the device
    and given back), ``cache_clears``.
    """
    return device_module.native().counters(index)


def reset_counters() -> None:
    """Set the counters of all devices to 0."""
    device_module.native().reset_counters()


@contextlib.contextmanager
def trace() -> Iterator[list[TraceRecord]]:
    """Record the work that runs in the context.

    The list is filled when the context ends, in the order in which the work ended; whatever is
    queued then is run first.
    """
    records: list[TraceRecord] = []
    native = device_module.native()
    native.drain()
    native.start_trace()
    try:
        yield records
    finally:
        records.extend(TraceRecord(*plain) for plain in native.stop_trace())


def drain() -> None:
    """Run all that is queued, on all streams; forget its errors, count no host sync."""
    device_module.native().drain()


def clock_us() -> float:
    """The host's time in microseconds: simulated, but real in mode ``"thread"``."""
    return device_module.native().clock_us()


def advance_clock(us: float) -> None:
    """Let ``us`` microseconds of the host's time pass. Without effect in mode ``"thread"``."""
    device_module.native().advance_clock(us)


def pinned_bytes() -> int:
    """Bytes of pinned host memory in use."""
    return device_module.native().pinned_bytes()
