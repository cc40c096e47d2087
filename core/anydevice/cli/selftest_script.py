"""What each process of ``anydevice test`` runs: distributed training, checked by value.

Each check runs on every process; a result is printed by the main one. A check that fails on any
process fails the test, and the others still run: each does all that the processes do together
before it looks at values.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from anydevice import Accelerator
from anydevice.cli.selftest import FOLDER
from anydevice.collectives import gather_object
from anydevice.registry import get_backend
from anydevice.text import says_yes

__all__ = ["main"]

_PRECISIONS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FEATURES: Final = 8
_EXAMPLES: Final = 23  # a multiple of no number of processes


def main() -> int:
    """Run every check, and print a line for each; with ``--json``, one object at the end.

    Returns:
        0 when all hold, else 1.
    """
    accelerator = Accelerator()
    report: dict[str, Any] = {
        "num_processes": accelerator.num_processes,
        "device_type": accelerator.device.type,
        "distributed_type": str(accelerator.distributed_type),
        "checks": [],
    }
    as_json = "--json" in sys.argv[1:]
    if not as_json:
        accelerator.print(
            f"{report['num_processes']} processes, {report['device_type']}, "
            f"{report['distributed_type']}"
        )
    checks: list[Callable[[Accelerator], str]] = [
        _processes,
        _collectives,
        _random_numbers,
        _loaders,
        _training,
        _mixed_precision,
        _save_and_load,
    ]
    for check in checks:
        result = _run(accelerator, check)
        report["checks"].append(result)
        if not as_json:
            accelerator.print("{name:<16} {state:<7} {seconds:6.2f} s  {message}".format(**result))
            sys.stdout.flush()
    accelerator.end_training()
    if as_json:
        accelerator.print(json.dumps(report, indent=2))
    return int(any(result["state"] != "ok" for result in report["checks"]))


def _run(accelerator: Accelerator, check: Callable[[Accelerator], str]) -> dict[str, Any]:
    """Run a check on every process: whether it holds on all of them, and what it says."""
    start = time.perf_counter()
    fault = said = ""
    try:
        said = check(accelerator)
    except Exception as error:  # noqa: BLE001 - whatever is wrong is the result
        fault = f"rank {accelerator.process_index}: {type(error).__name__}: {error!s:.300}"
        if says_yes(os.environ.get("ACCELERATE_DEBUG_MODE", "")):
            traceback.print_exc()
    faults = [f for f in gather_object([fault]) if f]
    return {
        "name": check.__name__.replace("_", " ").strip(),
        "state": "failed" if faults else "ok",
        "seconds": round(time.perf_counter() - start, 3),
        "message": "; ".join(faults) or said,
    }


def _processes(accelerator: Accelerator) -> str:
    """Every process is there, once, with a device of its own."""
    ranks = gather_object([accelerator.process_index])
    devices = gather_object([str(accelerator.device)])
    mains = sum(gather_object([accelerator.is_main_process]))
    _equal(ranks, list(range(accelerator.num_processes)), "ranks")
    if accelerator.device.type != "cpu" and len(set(devices)) != len(devices):
        raise AssertionError(f"processes share a device: {', '.join(devices)}")
    _equal(mains, 1, "main processes")
    return ", ".join(sorted(set(devices)))


def _collectives(accelerator: Accelerator) -> str:
    """Gathering, reducing and padding give the right values."""
    rank, size = accelerator.process_index, accelerator.num_processes
    mine = torch.full((2,), float(rank), device=accelerator.device)
    uneven = torch.ones(rank + 1, device=accelerator.device)
    gathered = accelerator.gather(mine).cpu().tolist()
    total = accelerator.reduce(mine, "sum").cpu().tolist()
    padded = accelerator.pad_across_processes(uneven)
    _equal(gathered, [float(r) for r in range(size) for _ in range(2)], "gathered values")
    _equal(total, [float(sum(range(size)))] * 2, "summed values")
    _equal(len(padded), size, "length of padded values")
    return "gather, reduce, pad"


def _random_numbers(accelerator: Accelerator) -> str:
    """One seed gives every process the same numbers."""
    torch.manual_seed(7)
    drawn = gather_object([torch.rand(4).tolist()])
    _equal(drawn, [drawn[0]] * accelerator.num_processes, "random numbers")
    return "one seed, one sequence"


def _loaders(accelerator: Accelerator) -> str:
    """Each example is seen, and evaluation sees none twice."""
    loader = accelerator.prepare(DataLoader(_Examples(list(range(_EXAMPLES))), batch_size=2))
    seen = [int(v) for batch in loader for v in accelerator.gather_for_metrics(batch)]
    _equal(sorted(seen), list(range(_EXAMPLES)), "examples seen")
    return f"{_EXAMPLES} examples, each once"


def _training(accelerator: Accelerator) -> str:
    """The processes keep equal parameters, and the loss falls."""
    first, last, model = _train(accelerator, "no")
    weights = _weight(accelerator, model).detach().float().flatten()
    everyone = accelerator.gather(weights.reshape(1, -1).to(accelerator.device))
    if not torch.allclose(everyone, everyone[:1].expand_as(everyone)):
        raise AssertionError("the processes have different parameters after training")
    return f"loss {first:.3f} -> {last:.3f}"


def _mixed_precision(accelerator: Accelerator) -> str:
    """Each precision of the device trains."""
    dtypes = get_backend(accelerator.device).autocast_dtypes()
    names = [name for name, dtype in _PRECISIONS.items() if dtype in dtypes]
    for name in names:
        _train(accelerator, name)
    return ", ".join(names) or "none on this device"


def _save_and_load(accelerator: Accelerator) -> str:
    """A saved state comes back equal."""
    folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir()) / "state"
    model, optimizer = _model(accelerator)
    accelerator.save_state(str(folder))
    before = _weight(accelerator, model).detach().clone()
    with torch.no_grad():
        _weight(accelerator, model).zero_()
    accelerator.load_state(str(folder))
    after = _weight(accelerator, model).detach()
    if not torch.equal(before.cpu(), after.cpu()):
        raise AssertionError("weights differ after saving and loading")
    accelerator.free_memory(model, optimizer)
    return "a state, bit for bit"


class _Examples(Dataset[Any]):
    """A list as a dataset."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


def _weight(accelerator: Accelerator, model: Any) -> torch.Tensor:
    plain: Any = accelerator.unwrap_model(model)
    weight: torch.Tensor = plain.weight
    return weight


def _model(accelerator: Accelerator) -> tuple[Any, Any]:
    torch.manual_seed(1)
    plain = nn.Linear(_FEATURES, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(plain, optimizer)
    return model, optimizer


def _train(accelerator: Accelerator, precision: str) -> tuple[float, float, Any]:
    """Fit a line; the first and last loss, and the model."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, _FEATURES, generator=generator)
    y = x.sum(1, keepdim=True)
    model, optimizer = _model(accelerator)
    loader = accelerator.prepare(DataLoader(_Examples(list(zip(x, y, strict=True))), batch_size=4))
    kind = accelerator.device.type
    dtype = _PRECISIONS.get(precision, torch.float32)
    losses = []
    for inputs, target in loader:
        with torch.autocast(kind, dtype, enabled=precision != "no"):
            loss = nn.functional.mse_loss(model(inputs), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")))
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.free_memory(model, optimizer)
    return losses[0], losses[-1], model


def _equal(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!s:.200} in place of {wanted!s:.200}")


if __name__ == "__main__":
    sys.exit(main())
