"""Running offloaded models: ``python -m benchmarks.transfer [--quick]``.

Times on the simulated accelerator are of its own clock, which counts kernels, copies and waits as
a device with such a link would take them; so they do not depend on the machine.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoint import library, new_folder, simulate
from benchmarks.harness import Metric, Suite, best_of
from benchmarks.models import Stack

#: modules in the chain of calls; width and depth of the model on disk; of the one behind the link
CALLS = {"full": 200, "quick": 10}
ON_DISK = {"full": (1024, 12, 1024), "quick": (32, 2, 32)}
LINKED = {"full": (256, 24, 256), "quick": (64, 6, 64)}
LINK = 12_000.0  # MB/s, about what a PCIe 3 slot carries
COPY_LATENCY = 10.0  # us


suite = Suite("benchmarks.transfer", lambda size, folder: None)


class Chain(nn.Module):
    """Many calls of modules that do next to nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def per_call(model: nn.Module, count: int) -> float:
    """Least seconds of one forward, divided by its calls."""
    x = torch.ones(1, 4)
    with torch.no_grad():
        return best_of(20, lambda: model(x)) / count


@suite.case(
    "a call of a hooked module, weights in place",
    Metric("overhead", "added to the plain call", target=0.3),
)
def in_place(side: str, size: str, folder: Path) -> Mapping[str, float]:
    torch.set_num_threads(1)
    count = CALLS[size]
    model = Chain(count)
    plain = per_call(model, count)
    device_map = {f"parts.{i}": "cpu" for i in range(count)}
    model = library(side).dispatch_model(model, device_map, force_hooks=True)
    return {"overhead": max(per_call(model, count) - plain, 1e-9)}


@suite.case(
    "a call of an offloaded leaf, CPU to CPU",
    Metric("overhead", "added to the plain call", target=0.02),
)
def leaf(side: str, size: str, folder: Path) -> Mapping[str, float]:
    torch.set_num_threads(1)
    count = CALLS[size]
    model = Chain(count)
    plain = per_call(model, count)
    model = library(side).cpu_offload(model, execution_device=torch.device("cpu"))
    return {"overhead": max(per_call(model, count) - plain, 1e-9)}


@suite.case(
    "forward on CPU of a model on disk, warm",
    Metric("forward", "seconds"),
    Metric("over", "over the plain model's own", "x", most=1.1),
)
def on_disk(side: str, size: str, folder: Path) -> Mapping[str, float]:
    torch.set_num_threads(1)
    plain, ids = Stack(*ON_DISK[size]), torch.arange(16)[None]
    with new_folder(folder) as offload, torch.no_grad():
        model = copy.deepcopy(plain)
        model = library(side).disk_offload(model, offload, execution_device=torch.device("cpu"))
        assert torch.equal(model(ids), plain(ids))
        # In turns, so that both meet the machine in the same moods.
        turns = [(best_of(1, lambda: plain(ids)), best_of(1, lambda: model(ids))) for _ in range(8)]
        own, forward = (min(times) for times in zip(*turns, strict=True))
        return {"forward": forward, "over": forward / own}


# ---------------------------------------------------------------------- behind a link


def linked(kernel: float, side: str, size: str, folder: Path) -> Mapping[str, float]:
    """Forward of a model that rests on the host, in the simulator's time.

    Args:
        kernel: microseconds that each kernel takes.
        side: which library.
        size: of the model.
        folder: not used.
    """
    from anydevice_conformance import simulator

    simulate("lazy", h2d=LINK, d2h=LINK, copy_latency=COPY_LATENCY, kernel=kernel, launch=1.0)
    model, ids = Stack(*LINKED[size]), torch.arange(16)[None]
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    total = sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        want = model(ids)
        compute = resident_us(model, ids)
        model = library(side).cpu_offload(model, execution_device=torch.device("sim:0"))
        for _ in range(3):  # what is found out and allocated in the first passes stays
            assert torch.allclose(model(ids).cpu(), want, atol=1e-4)
        simulator.reset_counters()
        forward = simulated_us(lambda: model(ids))
    copies = total / LINK
    bound = 1.05 * max(copies, compute) + block / LINK + COPY_LATENCY
    return {
        "forward": forward / 1e6,
        "bound": forward / bound,
        "allocations": simulator.counters(0)["device_allocs"],
    }


def resident_us(model: nn.Module, ids: torch.Tensor) -> float:
    """Microseconds of a forward with all weights on the device: what the kernels take."""
    resident, ids = copy.deepcopy(model).to("sim:0"), ids.to("sim:0")
    resident(ids)  # so that it has its memory
    return simulated_us(lambda: resident(ids))


def simulated_us(work: Callable[[], Any]) -> float:
    """Microseconds of the simulator's clock until the work is done."""
    from anydevice_conformance import simulator

    torch.accelerator.synchronize()
    start = simulator.clock_us()
    work()
    torch.accelerator.synchronize()
    return simulator.clock_us() - start


def _linked_metrics() -> tuple[Metric, ...]:
    return (
        Metric("forward", "simulated time"),
        Metric("bound", "over 1.05 max(copies, kernels) + a block's copy", "x", most=1.0),
        Metric("allocations", "allocations on the device, steady", "x", most=0),
    )


@suite.case("behind a link, copies rule", *_linked_metrics())
def copy_bound(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return linked(4.0, side, size, folder)


@suite.case("behind a link, balanced", *_linked_metrics())
def balanced(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return linked(20.0, side, size, folder)


@suite.case("behind a link, kernels rule", *_linked_metrics())
def compute_bound(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return linked(60.0, side, size, folder)


if __name__ == "__main__":
    sys.exit(suite.main())
