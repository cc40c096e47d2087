"""Planning where the modules of large models go: the first call in a fresh process.

    python -m benchmarks.planning

The models are mixtures of experts on meta: one of 62,000 modules whose layers stay whole, and one
of 4,200 modules whose experts are divided over the devices.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import OURS, Metric, Suite


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.act = nn.SiLU()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)


class Layer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([Expert(width) for _ in range(experts)])
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, layers: int, experts: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList([Layer(width, experts) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embed.weight


#: Layers and experts by size.
LARGE = {"quick": (4, 16), "full": (48, 260)}
SPLIT = {"quick": (2, 8), "full": (26, 31)}

suite = Suite("benchmarks.planning", lambda size, folder: folder.mkdir(parents=True, exist_ok=True))


def plan(side: str, shape: tuple[int, int], no_split: list[str]) -> Mapping[str, float]:
    if side == OURS:
        from anydevice import infer_auto_device_map
    else:
        from accelerate import infer_auto_device_map
    with torch.device("meta"):
        model: Any = Model(*shape)
    total = sum(p.nbytes for p in model.parameters())
    budgets: dict[int | str, int] = dict.fromkeys(range(4), total // 5)
    budgets["cpu"] = total
    infer_auto_device_map(nn.Linear(2, 2), max_memory={"cpu": 10**6})
    gc.collect()
    began = time.perf_counter()
    infer_auto_device_map(model, max_memory=budgets, no_split_module_classes=no_split)
    return {"seconds": time.perf_counter() - began}


@suite.case("62,000 modules, layers whole", Metric("seconds", "plan", target=0.3))
def large(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return plan(side, LARGE[size], ["Layer"])


@suite.case("4,200 modules, experts divided", Metric("seconds", "plan", target=0.5))
def split(side: str, size: str, folder: Path) -> Mapping[str, float]:
    return plan(side, SPLIT[size], [])


if __name__ == "__main__":
    suite.main()
