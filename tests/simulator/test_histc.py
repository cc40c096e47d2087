"""Whole numbers are counted on the device, though the CPU's kernel takes floating point only."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_histc_counts(simulator, dtype):
    values = torch.tensor([1, 2, 2, 5, 0], dtype=dtype)
    counts = torch.histc(values.to("sim:1"), bins=6, min=0, max=5)
    assert counts.dtype == dtype
    assert counts.tolist() == [1, 1, 2, 0, 0, 1]
