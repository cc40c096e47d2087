"""What a prepared training loop costs beside a raw one, and beside the peer's, in one run.

    python benchmarks/training.py [--quick] [--json FILE]

One process: CPU time of one thread, the least of several repetitions, taken in turns. Two
processes: wall time, the median of the ratios of neighbours, so that what else runs on
the machine weighs on both.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))

LIMITS = {
    "step, us over raw": 20.0,
    "loader, us a batch over raw": 2.0,
    "gather_for_metrics": 1.3,
    "DDP step": 1.02,
}


class Batches(Dataset):
    """Ready tensors: reading costs nothing, so that what is around it shows."""

    def __init__(self, count):
        self.pair = (torch.ones(4), torch.ones(1))
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.pair


def first(batch):
    return batch[0]


def least(function, rounds):
    """Seconds of the quickest round."""
    best = float("inf")
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
        gc.enable()
    return best


def parts():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def stepping(kind, count):
    """A function that makes ``count`` training steps of a tiny model."""
    model, optimizer, scheduler = parts()
    x = torch.ones(2, 4)
    if kind == "raw":

        def run():
            for _ in range(count):
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        return run
    accelerator = made(kind)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def run():
        for _ in range(count):
            with accelerator.accumulate(model):
                loss = model(x).sum()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def loading(kind, count):
    loader = DataLoader(Batches(count), 1, collate_fn=first)
    if kind != "raw":
        loader = made(kind).prepare(loader)

    def run():
        for _ in loader:
            pass

    return run


def made(kind):
    if kind == "peer":
        from accelerate import Accelerator
    else:
        from anydevice import Accelerator
    return Accelerator(cpu=True)


def one_process(quick):
    count, rounds = (200, 3) if quick else (2000, 7)
    found = {}
    for name, make in (("step, us over raw", stepping), ("loader, us a batch over raw", loading)):
        runs = {kind: make(kind, count) for kind in ("raw", "anydevice", "peer")}
        for run in runs.values():
            run()
        times = dict.fromkeys(runs, float("inf"))
        for _ in range(rounds):
            for kind, run in runs.items():
                times[kind] = min(times[kind], least(run, 1))
        raw = times["raw"]
        found[name] = {
            kind: 1e6 * (seconds - raw) / count for kind, seconds in times.items() if kind != "raw"
        }
        found[name]["raw, us"] = 1e6 * raw / count
    return found


def two_processes(rank, size, quick):
    """Ratios over raw torch, of wall time: both ranks work together."""
    from anydevice import Accelerator

    accelerator = Accelerator(cpu=True)
    count = 10
    rows = torch.ones(32, 1000)
    out = [torch.empty_like(rows) for _ in range(size)]

    def gather_raw():
        for _ in range(count):
            dist.all_gather(out, rows)
            torch.cat(out)

    def gather_ours():
        for _ in range(count):
            accelerator.gather_for_metrics(rows)

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    x = torch.randn(64, 256)
    raw = nn.parallel.DistributedDataParallel(network())
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=1e-3)
    module = network()
    ours, our_optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-3))

    def step_raw():
        for _ in range(count):
            raw(x).sum().backward()
            raw_optimizer.step()
            raw_optimizer.zero_grad()

    def step_ours():
        for _ in range(count):
            with accelerator.accumulate(ours):
                accelerator.backward(ours(x).sum())
                our_optimizer.step()
                our_optimizer.zero_grad()

    found = {}
    for name, raw_run, run, rounds in (
        ("gather_for_metrics", gather_raw, gather_ours, 3 if quick else 200),
        ("DDP step", step_raw, step_ours, 3 if quick else 60),
    ):
        pairs = []
        gc.collect()
        gc.disable()
        for turn in range(rounds):
            seconds = {}
            for which, each in ((0, raw_run), (1, run))[:: 1 if turn % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                each()
                seconds[which] = time.perf_counter() - start
            pairs.append((seconds[0], seconds[1]))
        gc.enable()
        ratio = statistics.median(ours / raw for raw, ours in pairs)
        least_raw = min(raw for raw, _ in pairs)
        found[name] = {"anydevice": ratio, "raw, us": 1e6 * least_raw / count}
    return found


def worker(rank, size, port, quick, queue):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    found = two_processes(rank, size, quick)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    from anydevice.processes import PartialState

    PartialState().destroy_process_group()


def pair(quick):
    import socket

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=worker, args=(r, 2, port, quick, queue)) for r in range(2)]
    for rank in ranks:
        rank.start()
    found = queue.get(timeout=300)
    for rank in ranks:
        rank.join()
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--alone", action="store_true", help="without the two processes")
    parser.add_argument("--together", action="store_true", help="the two processes only")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("ignore")
        found = {} if options.together else one_process(options.quick)
        if not options.alone:
            found |= pair(options.quick)
        for name, figures in found.items():
            shown = ", ".join(f"{kind} {value:.2f}" for kind, value in figures.items())
            print(f"{name}: {shown}  (limit {LIMITS[name]})")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    main()
