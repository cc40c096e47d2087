"""Ranks for `deepspeed_itself.py`."""

from __future__ import annotations

import importlib
import logging
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader
from training.loops import BATCH, close, data, fresh, parts, plain_loop
from training.trainer_ranks import tiny_llama

from anydevice import Accelerator
from anydevice.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

STEPS = 8


def _quietly():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo: nothing is compiled


def all_of_it(rank, size, folder):
    importlib.import_module("training.in_its_place")
    _quietly()
    return {
        "loops": loops_equal_the_plain_one(rank, size),
        "stand_ins": stand_ins(rank, size),
        "trainer": trainer(rank, size, folder),
    }


def loops_equal_the_plain_one(rank, size):
    """Each stage, with and without accumulation, against an ordinary loop."""
    for stage, steps, precision in (
        (0, 2, "no"),
        (1, 1, "no"),
        (2, 2, "no"),
        (3, 1, "no"),
        (2, 1, "bf16"),
    ):
        fresh()
        wanted = plain_loop(BATCH * size * steps, STEPS)
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_steps=steps,
            scheduler_unit="steps",
            deepspeed_plugin=DeepSpeedPlugin({"train_batch_size": "auto"}, zero_stage=stage),
        )
        found = _loop(accelerator)
        close(found, wanted, 2e-4 if precision == "no" else 0.05, f"stage {stage}")
    return True


def _loop(accelerator):
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data(), BATCH), scheduler
    )
    losses, part = [], []
    while len(losses) < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            part.append(loss.detach())
            if accelerator.sync_gradients:
                losses.append(torch.stack(part).mean())
                part = []
            if len(losses) == STEPS:
                break
    whole = accelerator.get_state_dict(model)
    return accelerator.reduce(torch.stack(losses), "mean").tolist(), whole


def stand_ins(rank, size):
    """DeepSpeed makes the optimizer and the schedule from the configuration."""
    fresh()
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=1))
    model = nn.Linear(4, 4)
    optimizer = DummyOptim(model.parameters(), lr=0.5)
    schedule = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data(), BATCH), schedule
    )
    rates = []
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates, type(schedule).__name__


def trainer(rank, size, folder):
    """transformers' Trainer with a configuration that leaves all to it."""
    from transformers import Trainer, TrainingArguments

    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    rows = tiny_llama()[1]

    def start():
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8 // size,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_steps=3,
            disable_tqdm=True,
            deepspeed=config,
        )
        return Trainer(tiny_llama()[0], arguments, train_dataset=rows, eval_dataset=rows[:9])

    first = start()
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    again = start()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    rest = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    return losses, rest[-1], first.evaluate()["eval_loss"], type(first.lr_scheduler).__name__
