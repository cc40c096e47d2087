"""Loading and offloading checkpoints: ``python -m benchmarks.checkpoint [--quick]``."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import LIMIT, OURS, PEER, Clock, Metric, Suite, best_of, drop_cached
from benchmarks.models import ManySmall, Stack, save_sharded

#: width, depth, words, shards; 1.84 GB in 6 shards, or next to nothing
STACKS = {"full": (1024, 35, 8192, 6), "quick": (32, 4, 64, 3)}
SIMULATED = "sim:0"
SMALL_TENSORS = {"full": 20_000, "quick": 200}


def prepare(size: str, folder: Path) -> None:
    """Make the checkpoints that all cases read."""
    width, depth, words, shards = STACKS[size]
    torch.manual_seed(0)
    save_sharded(Stack(width, depth, words).state_dict(), folder / "stack", shards)
    save_sharded(ManySmall(SMALL_TENSORS[size]).state_dict(), folder / "small", 4)


suite = Suite("benchmarks.checkpoint", prepare)


# ---------------------------------------------------------------------- parts of the cases


def library(side: str) -> Any:
    """Either library: their functions have the same names."""
    if side == PEER:
        return importlib.import_module("accelerate")
    return importlib.import_module("anydevice.big_modeling")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def plain_read(folder: Path) -> float:
    """Read the same bytes into one buffer that is there already."""
    files = files_of(folder)
    buffer = bytearray(max(path.stat().st_size for path in files))
    clock = Clock()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            view = memoryview(buffer)
            while count := file.readinto(view):
                view = view[count:]
    return clock()


def plain_copy(nbytes: int) -> float:
    """Copy as many bytes in memory, from pages that are there to pages that are there."""
    step = min(nbytes, 256 << 20)
    source, target = torch.ones(step, dtype=torch.uint8), torch.ones(step, dtype=torch.uint8)
    return best_of(3, lambda: target.copy_(source)) * nbytes / step


def plain_write(nbytes: int, path: Path) -> None:
    """Write as many bytes to one file."""
    block = memoryview(os.urandom(1 << 20))
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def empty_stack(side: str, size: str) -> Stack:
    width, depth, words, _ = STACKS[size]
    with library(side).init_empty_weights():
        return Stack(width, depth, words)


def load_and_run(
    side: str, size: str, folder: Path, dispatch: bool = True, **options: Any
) -> Mapping[str, float]:
    """Load the stack as ``options`` say, then run it once."""
    # One word, one thread: the forward touches each weight once, and computes next to nothing.
    torch.set_num_threads(1)
    model, ids = empty_stack(side, size), torch.zeros(1, 1, dtype=torch.long)
    load = library(side).load_checkpoint_and_dispatch
    clock = Clock()
    place = options["device_map"].get("", "cpu")
    if not dispatch:
        library(side).load_checkpoint_in_model(model, folder / "stack", **options)
    elif side == PEER and place == SIMULATED:
        # The peer's reader refuses devices that safetensors has no name for; this is its way there.
        model = load(model, folder / "stack", device_map={"": "cpu"}).to(place)
    else:
        model = load(model, folder / "stack", **options)
    loaded = clock()
    if place != "cpu":
        ids = ids.to(place)  # with all on one device, neither library moves inputs
    with torch.no_grad():
        output = model(ids)
    assert torch.isfinite(output.float().sum().cpu())
    return {"load": loaded, "forward": clock()}


def limits(folder: Path) -> Mapping[str, float]:
    nbytes = bytes_in(folder / "stack")
    return {"read": plain_read(folder / "stack"), "copy": plain_copy(nbytes)}


LOAD = Metric("load", "to return")
BOTH = (OURS, PEER)
WITH_LIMIT = (OURS, PEER, LIMIT)


# ---------------------------------------------------------------------- the cases


@suite.case(
    "float32 to CPU, warm",
    Metric("load", "to return", target=0.01, limit="read"),
    Metric("forward", "with the first forward", target=0.25, limit="read"),
    sides=WITH_LIMIT,
)
def cpu(side: str, size: str, folder: Path) -> Mapping[str, float]:
    if side == LIMIT:
        return limits(folder)
    return load_and_run(side, size, folder, dispatch=False, device_map={"": "cpu"})


@suite.case(
    "float32 to CPU and dispatched, warm",
    Metric("load", "to return", target=0.01),
    Metric("forward", "with the first forward", target=0.25),
)
def cpu_dispatched(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return load_and_run(side, size, folder, device_map={"": "cpu"})


@suite.case(
    "float32 to CPU, cold",
    Metric("load", "to return", limit="read"),
    Metric("forward", "with the first forward", limit="read"),
    sides=WITH_LIMIT,
)
def cpu_cold(side: str, size: str, folder: Path) -> Mapping[str, float]:
    drop_cached(files_of(folder / "stack"))
    return cpu(side, size, folder)


@suite.case(
    "cast to bfloat16 on CPU",
    Metric("load", "to return", target=0.3, limit="read"),
    Metric("forward", "with the first forward"),
    sides=WITH_LIMIT,
)
def cast(side: str, size: str, folder: Path) -> Mapping[str, float]:
    if side == LIMIT:
        return limits(folder)
    return load_and_run(side, size, folder, device_map={"": "cpu"}, dtype=torch.bfloat16)


@suite.case(
    "to a simulated accelerator",
    Metric("load", "to return", limit="both"),
    Metric("forward", "with the first forward"),
    sides=WITH_LIMIT,
)
def accelerator(side: str, size: str, folder: Path) -> Mapping[str, float]:
    if side == LIMIT:
        found = limits(folder)
        return {"both": found["read"] + found["copy"]}
    simulate("sync")
    return load_and_run(side, size, folder, device_map={"": SIMULATED})


@suite.case(
    "most layers on disk",
    Metric("load", "to return", target=0.1),
    Metric("forward", "with the first forward", target=0.25),
    Metric("written", "bytes written", "B", most=0),
)
def disk(side: str, size: str, folder: Path) -> Mapping[str, float]:
    depth = STACKS[size][1]
    on_cpu = ["embed", "head", *(f"blocks.{i}" for i in range(depth // 5))]
    device_map = dict.fromkeys(on_cpu, "cpu")
    device_map |= {f"blocks.{i}": "disk" for i in range(depth // 5, depth)}
    with new_folder(folder) as offload:
        numbers = load_and_run(side, size, folder, device_map=device_map, offload_folder=offload)
        return {**numbers, "written": bytes_in(offload)}


@suite.case(
    "disk_offload of a model in memory",
    Metric("write", "to return", target=0.25, limit="write"),
    Metric("synced", "until all is on the disk", limit="synced"),
    Metric("written", "bytes written", "B"),
    sides=WITH_LIMIT,
)
def disk_write(side: str, size: str, folder: Path) -> Mapping[str, float]:
    width, depth, words, _ = STACKS[size]
    nbytes = bytes_in(folder / "stack")
    model = Stack(width, depth, words)
    offloading = library(PEER if side == PEER else OURS).disk_offload
    with new_folder(folder) as offload:
        # A virtual machine is slow with memory that it never used: let it have the pages before.
        plain_write(nbytes, offload / "plain")
        (offload / "plain").unlink()
        os.sync()
        clock = Clock()
        if side == LIMIT:
            plain_write(nbytes, offload / "plain")
        else:
            offloading(model, offload, execution_device=torch.device("cpu"))
        numbers = {"write": clock()}
        os.sync()
        return {**numbers, "synced": clock(), "written": bytes_in(offload)}


@suite.case(
    "20,000 small tensors, half on disk",
    Metric("load", "to return", target=0.2),
)
def small(side: str, size: str, folder: Path) -> Mapping[str, float]:
    with library(side).init_empty_weights():
        model = ManySmall(SMALL_TENSORS[size])
    device_map = {"first": "cpu", "second": "disk"}
    with new_folder(folder) as offload:
        clock = Clock()
        library(side).load_checkpoint_and_dispatch(
            model, folder / "small", device_map=device_map, offload_folder=offload
        )
        return {"load": clock()}


@suite.case(
    "20,000 small tensors to CPU",
    Metric("load", "to return"),
)
def small_cpu(side: str, size: str, folder: Path) -> Mapping[str, float]:
    with library(side).init_empty_weights():
        model = ManySmall(SMALL_TENSORS[size])
    clock = Clock()
    library(side).load_checkpoint_in_model(model, folder / "small", device_map={"": "cpu"})
    return {"load": clock()}


@suite.case(
    "peak memory over checkpoint size",
    Metric("cpu", "float32 to CPU, its own pages", "x"),
    Metric("cpu_all", "float32 to CPU, with the files' pages", "x"),
)
def memory(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return memory_of(side, size, folder, "cpu", device_map={"": "cpu"})


@suite.case(
    "peak memory over checkpoint size",
    Metric("cast", "cast to bfloat16, its own pages", "x"),
    Metric("cast_all", "cast to bfloat16, with the files' pages", "x"),
)
def memory_cast(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return memory_of(side, size, folder, "cast", device_map={"": "cpu"}, dtype=torch.bfloat16)


def memory_of(side: str, size: str, folder: Path, name: str, **options: Any) -> Mapping[str, float]:
    with PeakMemory() as peak:
        load_and_run(side, size, folder, **options)
    nbytes = bytes_in(folder / "stack")
    return {name: peak.own / nbytes, f"{name}_all": peak.all / nbytes}


class PeakMemory:
    """The most memory that this process gains while the context lasts, by looking often.

    Attributes:
        own: bytes that only the process has (anonymous pages).
        all: with the pages of files that it maps, which the system may drop at any time.
    """

    own = all = 0

    def __enter__(self) -> PeakMemory:
        self._start = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._look()

    def _look(self) -> None:
        own, everything = self._now()
        self.own = max(self.own, own - self._start[0])
        self.all = max(self.all, everything - self._start[1])

    @staticmethod
    def _now() -> tuple[int, int]:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return tuple(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "VmRSS"))


def simulate(mode: str, **options: Any) -> None:
    """One simulated accelerator with room for all."""
    from anydevice_conformance import simulator

    simulator.configure(devices=1, memory=["8GiB"], mode=mode, **options)


if __name__ == "__main__":
    sys.exit(suite.main())
