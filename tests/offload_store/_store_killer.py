"""Run by test_processes.py: forks writers of an offload store, and kills them.

It forks from a process with one thread that has imported everything, so that a hundred writers
cost little. Prints one JSON line.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

import torch

from anydevice.errors import DiskFullError, OffloadStoreError
from anydevice.offload_store import tensor_bytes, writing
from anydevice.offload_store.store import open_store, write_store

torch.set_num_threads(1)
writing.LARGEST_FILE = 512 << 10
tensor_bytes.PIECE = 128 << 10


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(128, 256, generator=generator) for i in range(12)}


WEIGHTS = weights()


def right(store):
    return store.keys() == WEIGHTS.keys() and all(
        torch.equal(store[n], t) for n, t in WEIGHTS.items()
    )


def spawn(work):
    """Fork a child that does ``work`` and exits with its result, 0 to 100."""
    child = os.fork()
    if child:
        return child
    code = 101
    try:
        code = work() or 0
    finally:
        os._exit(code)


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state(folder):
    """What a reader finds: "complete", "refused", or "WRONG"."""
    try:
        store = open_store(folder)
    except OffloadStoreError:
        return "refused"
    return "complete" if right(store) else "WRONG"


def heals(folder):
    """Whether the next writer ends with a right store and no litter."""
    store = write_store(folder, WEIGHTS)
    names = sorted(p.name for p in Path(folder).iterdir())
    return right(store) and len(names) == 5 and not any(n.endswith(".tmp") for n in names)


def write_and_end(folder):
    """Write a store, and change something that is not in it."""
    write_store(folder, WEIGHTS)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / "nothing")


def killed_at_each_step(root):
    """SIGKILL before the n-th system call that changes the folder, for every n."""
    states = []
    for step in range(1, 1000):
        folder = root / str(step)

        def work(folder=folder, step=step):
            left = [step]
            for name in ("write", "replace", "unlink", "mkdir"):
                real = getattr(os, name)

                def counted(*args, real=real, **kwargs):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                setattr(os, name, counted)
            write_and_end(folder)

        if wait(spawn(work)) == 0:
            break
        states.append(state(folder))
        states.append("healed" if heals(folder) else "WRONG")
    return states


def killed_at_random(root):
    """The system ends the writer at a moment that nobody chose."""
    states = []
    for number in range(40):
        folder = root / str(number)

        def work(folder=folder):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.05))
            write_and_end(folder)

        ended = wait(spawn(work))
        found = state(folder)
        states.append("WRONG" if ended == 0 and found != "complete" else found)
        states.append("healed" if heals(folder) else "WRONG")
    return states


def same_weights_at_once(root):
    children = [spawn(lambda: not right(write_store(root, WEIGHTS))) for _ in range(5)]
    return [wait(child) for child in children] + [state(root)]


def other_weights_at_once(root):
    """One of them wins; each other is refused; the store is the winner's."""

    def work(seed):
        mine = weights(seed)
        try:
            store = write_store(root, mine)
        except OffloadStoreError:
            return 1
        return 0 if all(torch.equal(store[n], t) for n, t in mine.items()) else 2

    children = [spawn(lambda seed=seed: work(seed)) for seed in range(1, 5)]
    return sorted(wait(child) for child in children)


def file_size_limit(root):
    """A real limit of the system, met in the middle of a file."""

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try:
            write_store(root, WEIGHTS)
        except DiskFullError:
            return len(list(root.iterdir()))  # the lock alone
        return 100

    return [wait(spawn(work)), state(root)]


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    print(json.dumps(globals()[name](Path(folder))))
