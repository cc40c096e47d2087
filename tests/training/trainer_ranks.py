"""Ranks for `test_trainer.py`: transformers' Trainer on anydevice instead of Accelerate."""

from __future__ import annotations

import torch


def tiny_llama():
    """A model, always the same, and rows to train it on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    rows = torch.arange(64).repeat(4).reshape(32, 8)
    return LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in rows]


def train(rank, size, folder, sharded=False):
    from transformers import Trainer, TrainingArguments

    data = tiny_llama()[1]
    options = {
        "per_device_train_batch_size": 8 // size,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_steps": 3,
        "bf16": True,
        "disable_tqdm": True,
    }
    if sharded:
        wrapped = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"fsdp": "full_shard auto_wrap", "fsdp_config": wrapped}

    def trainer():
        arguments = TrainingArguments(folder, **options)
        return Trainer(tiny_llama()[0], arguments, train_dataset=data, eval_dataset=data[:9])

    first = trainer()
    assert type(first.accelerator).__module__ == "anydevice.training.accelerator"
    assert first.accelerator.is_fsdp2 is sharded
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    rest = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    return losses, rest[-1], first.evaluate()["eval_loss"], first.accelerator.num_processes
