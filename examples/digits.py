"""Train a classifier of handwritten digits (scikit-learn's) and evaluate it over all processes.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py --cpu --mixed-precision bf16
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anydevice import Accelerator
from anydevice.utils import set_seed


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of 1,500 training images and of the 297 others."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train = torch.utils.data.Subset(data, range(1500))
    test = torch.utils.data.Subset(data, range(1500, len(data)))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 2 * batch_size)


def network() -> nn.Module:
    """A small convolutional network for images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the share of test images that are named right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed-precision", default=None)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    options = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator(
        cpu=options.cpu,
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = loaders(options.batch_size)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    accuracy = 0.0
    for epoch in range(options.epochs):
        model.train()
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right, seen = 0, 0
        for images, labels in test:
            with torch.no_grad():
                found = model(images).argmax(1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right += int((found == labels).sum())
            seen += len(labels)
        accuracy = right / seen
        accelerator.print(f"epoch {epoch}: {right} of {seen} right ({accuracy:.1%})")
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
