"""On a real accelerator: ``python -m benchmarks.gpu [--device foo:0] [--gigabytes 8]``.

Two questions. Does an offloaded model use the link as well as plain page-locked copies do (wanted:
at least 0.9 of their bandwidth)? And how long does a forward take beside the peer's `cpu_offload`
and diffusers' group offloading, where these are installed? ``--device sim:0`` runs it on the
simulator, where the times mean nothing, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import nn

from anydevice import available_devices
from anydevice.big_modeling import cpu_offload
from benchmarks.harness import Clock
from benchmarks.models import Stack


def main() -> int:
    """Measure, and print a table."""
    options = read_options()
    if (options.device or "").startswith("sim"):
        simulate()
    device = torch.device(options.device or first_device())
    torch.manual_seed(0)
    model, ids = make_model(options.gigabytes, options.dtype), torch.arange(options.tokens)[None]
    nbytes = sum(p.nbytes for p in model.parameters())
    link = link_bandwidth(device, min(nbytes, 1 << 30))
    print(f"{torch.accelerator.current_accelerator()} {device}, torch {torch.__version__}")
    print(f"model: {nbytes / 1e9:.2f} GB, {options.dtype}, {options.tokens} tokens")
    print(f"link, plain page-locked copies: {link / 1e9:.2f} GB/s\n")
    print("| way | forward | bytes/s of weights, over the link's |")
    print("| --- | ---: | ---: |")
    for name, prepare in ways(device).items():
        seconds = forward_seconds(prepare(clone(model)), ids, device, options.repeats)
        print(f"| {name} | {seconds * 1e3:.1f} ms | {nbytes / seconds / link:.2f} |", flush=True)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", help="by default the first accelerator")
    parser.add_argument("--gigabytes", type=float, default=8, help="size of the model")
    parser.add_argument("--tokens", type=int, default=16, help="few: copies rule; many: kernels do")
    parser.add_argument("--repeats", type=int, default=5, help="forwards, of which the best counts")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    return parser.parse_args()


def first_device() -> str:
    for device in available_devices():
        if torch.device(str(device)).type != "cpu":
            return str(device)
    raise SystemExit("no accelerator here; `--device sim:0` takes the simulator")


def simulate() -> None:
    from anydevice_conformance import simulator

    simulator.configure(devices=1, memory="8GiB", mode="sync")


def make_model(gigabytes: float, dtype: torch.dtype) -> Stack:
    """A stack of blocks of about 0.4 GB, or of a 24th of the whole where that is less."""
    block = min(0.4e9, gigabytes * 1e9 / 24)
    width = max(64, int((block / dtype.itemsize / 12) ** 0.5) // 64 * 64)
    depth = max(1, round(gigabytes * 1e9 / (12 * width**2 * dtype.itemsize)))
    with torch.device("meta"):
        model = Stack(width, depth, 1024)
    model = model.to(dtype).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.01, 0.01)
    return model


def clone(model: nn.Module) -> nn.Module:
    """The same weights in a model of its own; the ways below change the modules, not the values."""
    import copy

    memo = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def link_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes per second of page-locked memory to the device, the best of five."""
    source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(5):
        torch.accelerator.synchronize()
        clock = Clock()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        best = max(best, nbytes / clock())
    return best


def forward_seconds(
    model: nn.Module, ids: torch.Tensor, device: torch.device, repeats: int
) -> float:
    """Least seconds of a forward, after three that warm up."""
    times = []
    with torch.no_grad():
        for number in range(3 + repeats):
            torch.accelerator.synchronize()
            clock = Clock()
            model(ids.to(device))
            torch.accelerator.synchronize()
            if number >= 3:
                times.append(clock())
    return min(times)


def ways(device: torch.device) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Ways to run a model whose weights rest on the host, by name; those that are installed."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {
        "anydevice cpu_offload": lambda model: cpu_offload(model, execution_device=device)
    }
    if importlib.util.find_spec("accelerate"):
        accelerate = importlib.import_module("accelerate")
        found["accelerate cpu_offload"] = lambda model: accelerate.cpu_offload(
            model, execution_device=device
        )
    # It sets `.data` of a host tensor to a device's, which torch refuses for a simulated device.
    if device.type != "sim" and importlib.util.find_spec("diffusers"):
        hooks = importlib.import_module("diffusers.hooks")

        def grouped(model: nn.Module) -> nn.Module:
            hooks.apply_group_offloading(
                model,
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=1,
                use_stream=torch.accelerator.current_accelerator() is not None,
            )
            return model

        found["diffusers group offloading"] = grouped
    return found


if __name__ == "__main__":
    sys.exit(main())
