"""Ranks for `test_equality.py`: each engine against the plain loop, in one launch."""

from __future__ import annotations

import traceback

import torch
from training.loops import BATCH, STEPS, close, fresh, make, plain_loop, prepared_loop

CASES = [
    ("ddp", "no", 1),
    ("ddp", "no", 2),
    ("ddp", "bf16", 2),
    ("ddp", "fp16", 2),
    ("fsdp2", "no", 1),
    ("fsdp2", "no", 2),
    ("fsdp2", "bf16", 1),
    ("fsdp2", "fp16", 2),
    ("fsdp2-zero2-prefetch", "no", 2),
    ("fsdp2-ac", "no", 1),
    ("fsdp2-offload", "no", 2),
    ("hsdp", "no", 1),
    ("tp", "no", 1),
    ("tp", "no", 2),
    ("tp+fsdp2", "no", 2),
]
#: Those that more ranks, and another device, go through.
FEW = [
    ("ddp", "no", 2),
    ("ddp", "fp16", 2),
    ("fsdp2", "no", 2),
    ("fsdp2", "bf16", 1),
    ("hsdp", "no", 1),
    ("tp", "no", 1),
    ("tp+fsdp2", "no", 2),
]
#: Each engine once over all steps; what else a case varies shows in the first epochs.
LONG = [
    ("ddp", "no", 1),
    ("fsdp2", "no", 1),
    ("hsdp", "no", 1),
    ("tp", "no", 2),
    ("tp+fsdp2", "no", 2),
]
#: Three epochs or more.
SHORT_STEPS = 6


def all_engines(rank, size, cpu):
    """The cases that were not as the plain loop, with their tracebacks."""
    failed = {}
    for engine, precision, accumulation in CASES:
        if size < 4 and engine in ("hsdp", "tp+fsdp2"):
            continue
        if (engine, precision, accumulation) not in FEW and (size > 2 or not cpu):
            continue
        fresh()
        try:
            accelerator = make(engine, precision, accumulation, cpu=cpu)
            together = 1 if engine == "tp" else size // 2 if engine == "tp+fsdp2" else size
            steps = STEPS if (engine, precision, accumulation) in LONG else SHORT_STEPS
            wanted = plain_loop(BATCH * together * accumulation, steps)
            found = prepared_loop(accelerator, steps=steps)
            assert len(found[0]) == steps
            close(found, wanted, 2e-4 if precision == "no" else 0.05)
            if accelerator.is_main_process:
                assert found[1]
        except Exception:  # noqa: BLE001 - the test shows it
            failed[engine, precision, accumulation] = traceback.format_exc()
            break  # the other ranks may be elsewhere now
    torch.distributed.barrier() if not failed else None
    return failed
