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


def die(folder):
    from anydevice import Accelerator

    accelerator = Accelerator()
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
