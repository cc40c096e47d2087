"""Models to measure with, in plain torch, and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    """A transformer's block with its weights and about its work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(a * torch.sigmoid(b) + c)
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ManySmall(nn.Module):
    """Thousands of small tensors, in two halves."""

    def __init__(self, count: int) -> None:
        super().__init__()
        half = count // 4  # a Linear has two tensors
        self.first = nn.ModuleList([nn.Linear(8, 8) for _ in range(half)])
        self.second = nn.ModuleList([nn.Linear(8, 8) for _ in range(half)])


def save_sharded(state: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    """Write a checkpoint as large models have theirs: shards of like size, and an index."""
    folder.mkdir(parents=True)
    total = sum(tensor.nbytes for tensor in state.values())
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if filled >= total / shards and len(groups) < shards:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    where = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
