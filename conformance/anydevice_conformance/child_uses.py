"""How a child uses a device: in a forked process, and from several threads at once."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any

__all__ = ["backend_of", "first_use", "use_in_fork"]


def backend_of(device_type: str) -> Any:
    """The backend, asked in the order that the interface promises."""
    from anydevice import registry

    backend = registry.get_backend(device_type)
    backend.device_count()  # first of all, as the interface promises
    with contextlib.suppress(Exception):
        backend.module  # noqa: B018 - imports the package that makes torch know the device
    return backend


def use_in_fork(device_type: str) -> dict[str, Any]:
    """Use the device in a forked child; how that ended."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if _uses_device(device_type) else 2
        except BaseException:  # noqa: BLE001 - the child must not return to its parent's code
            os.write(writable, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(code)
    os.close(writable)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            words = os.read(readable, 1 << 16).decode(errors="replace")
            return {"code": os.waitstatus_to_exitcode(status), "words": words}
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return {"code": "hung", "words": ""}


def _uses_device(device_type: str) -> bool:
    import torch

    backend = backend_of(device_type)
    there = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, 0)
    values = torch.arange(8.0)
    result = backend.move(backend.move(values, there) + 1, torch.device("cpu"))
    backend.device_name(0)
    backend.supports_dtype(torch.float32)
    backend.synchronize(0)
    for member in (backend.memory_info, backend.memory_allocated):
        with contextlib.suppress(NotImplementedError):
            member(0)
    if backend.capabilities.device_rng:
        drawn = []
        for _ in range(2):
            backend.manual_seed_all(5)
            drawn.append(backend.move(torch.rand(9, device=there), torch.device("cpu")))
        if not torch.equal(*drawn):
            raise AssertionError("in the forked child a seed does not make numbers repeat")
    if backend.capabilities.streams:
        with backend.use_stream(backend.new_stream(0)) as stream:
            backend.synchronize_event(backend.record_event(stream))
    if backend.capabilities.pinned_memory:
        backend.pin_memory(values)
    return torch.equal(result, values + 1)


def first_use(device_type: str) -> dict[str, Any]:
    """Have eight threads use the device, each as if it were the first."""
    import threading

    import torch

    from anydevice import registry

    together, faults = threading.Barrier(8), []

    def use(number: int) -> None:
        try:
            together.wait(60)
            backend = registry.get_backend(device_type)
            count = backend.device_count()
            index = number % count
            there = backend.move(torch.full((50,), float(number)), backend.device(index))
            if backend.move(there + 1, torch.device("cpu")).tolist() != [number + 1.0] * 50:
                faults.append(f"thread {number} got another's values")
            if (there.device.index or 0) != index:
                faults.append(f"thread {number} asked for device {index}, and got {there.device}")
            for _ in range(2):
                if backend.device_name(index) != backend.device_name(index):
                    faults.append(f"thread {number} was told two names of device {index}")
            if not backend.supports_dtype(torch.float32):
                faults.append(f"thread {number} was told that float32 is not supported")
            backend.synchronize(index)
        except Exception as error:  # noqa: BLE001 - reported
            faults.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"faults": faults}
