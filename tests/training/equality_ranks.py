"""Ranks for `test_equality.py`: each engine against the plain loop, many cells in one launch."""

from __future__ import annotations

import functools
import itertools
import traceback

import torch
from training.loops import BATCH, STEPS, close, fresh, make, plain_loop, prepared_loop

PRECISIONS = ("no", "bf16", "fp16")
#: Engines for any number of ranks from two, and those that divide them in two ways.
ENGINES = ("ddp", "fsdp2", "tp", "pp")
MIXED = ("hsdp", "tp+fsdp2")
#: Accumulated batches: one, or some of which one is neither first nor last.
ACCUMULATED = 3
#: Samples: a whole step of four ranks.
COUNT = BATCH * 4 * ACCUMULATED
#: What engines can be told besides.
CHOICES = [
    ("fsdp2-zero2-prefetch", "no", ACCUMULATED),
    ("fsdp2-ac", "no", 1),
    ("fsdp2-offload", "no", ACCUMULATED),
]


def cells(engines=ENGINES, precisions=PRECISIONS, accumulations=(1, ACCUMULATED)):
    """All cells of a grid: engine, precision, accumulated batches."""
    return list(itertools.product(engines, precisions, accumulations))


@functools.cache
def _wanted(batch, blocks):
    return plain_loop(batch, STEPS, blocks=blocks, count=COUNT)


def equal(rank, size, cpu, chosen):
    """The cells that were not as the plain loop, with their tracebacks."""
    failed = {}
    for engine, precision, accumulation in chosen:
        fresh()
        try:
            accelerator = make(engine, precision, accumulation, cpu=cpu)
            # How many processes have batches of their own; a pipeline's are as many times longer.
            groups = {"tp": 1, "tp+fsdp2": size // 2}.get(engine, size)
            batch = BATCH * size if engine == "pp" else BATCH
            found = prepared_loop(accelerator, batch, count=COUNT)
            assert len(found[0]) == STEPS
            wanted = _wanted(BATCH * groups * accumulation, 4 if engine == "pp" else 2)
            close(found, wanted, 2e-4 if precision == "no" else 0.05)
            if accelerator.is_main_process:
                assert found[1]
        except Exception:  # noqa: BLE001 - the test shows it
            failed[engine, precision, accumulation] = traceback.format_exc()
            break  # the other ranks may be elsewhere now
    torch.distributed.barrier() if not failed else None
    return failed
