"""Train a small causal language model with sharded weights; stop in an epoch, and go on.

    torchrun --nproc-per-node 2 examples/language_model.py --cpu --folder run --stop-after 6
    torchrun --nproc-per-node 2 examples/language_model.py --cpu --folder run --resume

The text is what Python says of some of its own modules, letter by letter. The model is a Llama of
transformers, made from a configuration. The second command goes on in the middle of the epoch, on
any number of processes.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from anydevice import Accelerator, skip_first_batches
from anydevice.utils import (
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)


class Letters(Dataset):
    """Pieces of a text, as the bytes of its letters."""

    def __init__(self, length: int = 64) -> None:
        import site

        text = (site.__doc__ or "") + __doc__ + (argparse.__doc__ or "") + (math.__doc__ or "")
        self.codes = torch.tensor(list((text * 4).encode()), dtype=torch.long) % 128
        self.length = length

    def __len__(self) -> int:
        return len(self.codes) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.codes[index * self.length : (index + 1) * self.length]


class Position:
    """How far the run has come: saved and loaded with everything else."""

    def __init__(self) -> None:
        self.epoch, self.batch, self.steps = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the numbers."""
        vars(self).update(state)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed-precision", default=None)
    parser.add_argument("--stop-after", type=int, default=0, help="steps; 0 trains to the end")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator(
        cpu=options.cpu,
        mixed_precision=options.mixed_precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=True),
        project_config=ProjectConfiguration(
            options.folder, automatic_checkpoint_naming=True, total_limit=2
        ),
        log_with="jsonl",
    )
    accelerator.init_trackers("language_model", config=vars(options))
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Letters(), options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)
    if options.resume:
        accelerator.load_state()

    losses: list[float] = []
    for epoch in range(position.epoch, options.epochs):
        position.epoch = epoch
        batches = skip_first_batches(loader, position.batch)
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            position.batch += 1
            position.steps += 1
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.log({"loss": losses[-1]}, step=position.steps)
            if position.steps == options.stop_after:
                accelerator.save_state()
                accelerator.print(f"stopped after {position.steps} steps, loss {losses[-1]:.3f}")
                accelerator.end_training()
                return losses
        position.batch = 0
    accelerator.save_model(model, f"{options.folder}/model")
    accelerator.print(f"done after {position.steps} steps, loss {losses[-1]:.3f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
