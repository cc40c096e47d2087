"""What a check does in another process: ``python -m ....children TASK TYPE JSON``.

The child prints one line of JSON. It sees the same environment, so the same drivers, simulator and
plugins.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from anydevice_conformance import warm
from anydevice_conformance.child_uses import (
    answers_of_each,
    backend_of,
    count_at_once,
    first_use,
    first_use_in_fork,
    use_in_fork,
)
from anydevice_conformance.ends import end_at_once

__all__ = ["Holder", "answer_of", "ask", "end", "start"]

_LIMIT: Final = 120


# ---------------------------------------------------------------------- in the parent


def start(
    task: str, device_type: str, environment: dict[str, str] | None = None, **args: Any
) -> Any:
    """Start a child; returns a `subprocess.Popen`, or what the suite uses of one."""
    words = [task, device_type, json.dumps(args)]
    whole = {**os.environ, **(environment or {})}
    return warm.start(__name__, words, environment=whole, fresh=bool(environment))


def ask(
    task: str, device_type: str, environment: dict[str, str] | None = None, **args: Any
) -> dict[str, Any]:
    """Run a task in a child and return what it says.

    Raises:
        AssertionError: the child died, hung or raised; with its last words.
    """
    return answer_of(start(task, device_type, environment, **args))


def answer_of(process: Any, limit: float = _LIMIT) -> dict[str, Any]:
    """Wait for a child and read its answer; on a busy machine for so much longer.

    Raises:
        AssertionError: as `ask`.
    """
    limit = round(limit * _busy())
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"a child process hung for {limit} s: {err[-800:]}") from None
    finally:
        end(process)
    answer = read_answer(out)
    if process.returncode != 0 or answer is None:
        raise AssertionError(f"a child process ended with code {process.returncode}: {err[-1500:]}")
    return answer


def _busy() -> float:
    """How many times longer everything takes, as more processes want to run than can; at most 4."""
    try:
        waiting = os.getloadavg()[0]
    except (AttributeError, OSError):  # the system does not say
        return 1.0
    return min(4.0, max(1.0, waiting / (os.cpu_count() or 1)))


def end(process: Any) -> None:
    """End a child, if it still runs, and close what it was spoken to through."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # a pipe that broke cannot be flushed
            pipe.close()
    process.wait()


def read_answer(out: str) -> dict[str, Any] | None:
    """The answer in what a child printed; None where it ended before it had one."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    answer: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return answer


class Holder:
    """Another process that holds as much of a device's memory as it is told to."""

    def __init__(self, device_type: str, index: int) -> None:
        self._process = start("hold", device_type, index=index)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *args: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError, OSError):
            self._process.communicate("", timeout=20)
        end(self._process)

    def hold(self, size: int) -> None:
        """Have it hold ``size`` bytes, and nothing else.

        Raises:
            AssertionError: it could not.
        """
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{size}\n")
            self._process.stdin.flush()
        if not self._process.stdout.readline().startswith("{"):
            self._process.kill()
            raise AssertionError(
                f"a process that allocates died: {self._process.stderr.read()[-1500:]}"
            )


# ---------------------------------------------------------------------- in the child


def count(device_type: str) -> dict[str, Any]:
    """What presence looks like here; an exception is part of the answer."""
    from anydevice import registry

    backend = registry.get_backend(device_type)
    found: dict[str, Any] = {}
    for name in ("is_available", "device_count"):
        try:
            found[name] = getattr(backend, name)()
        except Exception as error:  # noqa: BLE001 - reported
            found[name] = f"{type(error).__name__}: {error}"
    return found


def fork_after_count(device_type: str) -> dict[str, Any]:
    """Ask for presence only, then use the device in forked children: by one thread, by many."""
    from anydevice import registry

    backend = registry.get_backend(device_type)
    counts = count_at_once(backend)
    found = {**use_in_fork(device_type), "faults": first_use_in_fork(device_type)}
    if len(set(counts)) > 1:  # the first to ask is several threads
        found["faults"] = [f"first of all, threads counted {counts}", *found["faults"]]
    started = _what_started(backend)
    return {**found, "started": started, "backwards": answers_of_each(backend, backwards=True)}


def fork_after_discovery(device_type: str) -> dict[str, Any]:
    """Ask the registry only, then use the device in a forked child."""
    import anydevice

    anydevice.list_backends()
    anydevice.available_devices()
    found = use_in_fork(device_type)
    return {**found, "started": _what_started(anydevice.get_backend(device_type))}


def _what_started(backend: Any) -> str:
    """What a process that only counted has started; nothing, if all is well."""
    for index in range(backend.device_count()):
        for name in ("memory_allocated", "peak_memory_allocated"):
            try:
                size = getattr(backend, name)(index)
            except Exception:  # noqa: BLE001 - it does not say
                continue
            if size and backend.device_type != "cpu":
                return f"{name}({index}) is {size}: counting made a tensor"
    return ""


def live(device_type: str) -> dict[str, Any]:
    """Use the device while things happen to this process; see `life.live`."""
    from anydevice_conformance.life import live as whole_life

    return whole_life(device_type)


def hold(device_type: str, index: int) -> dict[str, Any]:
    """Hold as many bytes of a device as each line that comes in says."""
    import torch

    backend = backend_of(device_type)
    there = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, index)
    held = None
    for line in sys.stdin:
        del held
        backend.synchronize(index)
        backend.empty_cache(index)
        held = torch.ones(int(line), dtype=torch.uint8, device=there)
        backend.synchronize(index)
        print(json.dumps({"held": held.nbytes}), flush=True)
    return {}


def collective(device_type: str, **options: Any) -> dict[str, Any]:
    """One rank of the checks of collectives, or of training; see `ranks.run_rank`.

    "members" is what was wrong with the calls of members meanwhile.
    """
    from anydevice_conformance.monitor import monitored
    from anydevice_conformance.ranks import run_rank
    from anydevice_conformance.session import find_subject

    with monitored(find_subject(device_type)) as faults:
        return {**run_rank(device_type, **options), "members": faults}


def miss_collective(
    device_type: str, rank: int, world: int, store: str, index: int
) -> dict[str, Any]:
    """One rank of the check of a rank that does not come."""
    from anydevice_conformance.ranks import miss

    return miss(device_type, rank, world, store, index)


_TASKS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    f.__name__: f
    for f in (
        count,
        fork_after_count,
        fork_after_discovery,
        first_use,
        live,
        hold,
        collective,
        miss_collective,
    )
}


def main() -> NoReturn:
    """Run the task that the command line names, and end at once.

    An interpreter that finalizes while another thread, such as one of a collective that is still
    under way, waits for it would abort the process.
    """
    task, device_type, args = sys.argv[1:4]
    code = 1
    try:
        print(json.dumps(_TASKS[task](device_type, **json.loads(args))), flush=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        traceback.print_exc()
    end_at_once(code)


if __name__ == "__main__":
    main()
