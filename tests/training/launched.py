"""Functions that launchers start in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import torch


def write_rank(folder):
    from anydevice import Accelerator

    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum").item()
    text = f"{accelerator.num_processes} {total} {accelerator.mixed_precision}"
    started = multiprocessing.get_start_method(allow_none=True)
    Path(folder, f"rank-{accelerator.process_index}").write_text(f"{text} {started}")


def write_rank_and_die(folder):
    """Rank 1 is killed; the others never end by themselves."""
    write_rank(folder)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()
