"""Ranks for `test_pipeline.py`: a transformers model with tied weights, trained in a pipeline."""

from __future__ import annotations

import torch
from training.loops import fails, fresh, make

from anydevice import Accelerator, ParallelismConfig
from anydevice.errors import ModelError, OptionError
from anydevice.utils import PipelineParallelConfig

STEPS = 6


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def _rows():
    return torch.arange(48).reshape(6, 8) % 32


def _plain(steps=STEPS):
    model = _llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for _ in range(steps):
        loss = model(input_ids=_rows(), labels=_rows(), use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def _prepared(size, cpu):
    fresh()
    config = ParallelismConfig(pp_size=size, pp_handler=PipelineParallelConfig(microbatches=2))
    accelerator = Accelerator(cpu=cpu, parallelism_config=config)
    model = _llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def _steps(accelerator, model, optimizer, steps):
    losses, norms = [], []
    rows = _rows().to(accelerator.device)
    for _ in range(steps):
        loss = accelerator.train_step(model, input_ids=rows, labels=rows)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def a_tied_model(rank, size, folder, cpu):
    """It trains as one process does, is saved, and goes on in a pipeline and without one."""
    wanted_losses, wanted_norms, wanted = _plain()
    accelerator, model, optimizer = _prepared(size, cpu)
    assert accelerator.pipeline_parallel_rank == rank
    losses, norms = _steps(accelerator, model, optimizer, 3)
    accelerator.save_state(f"{folder}/pp")
    rest = _steps(accelerator, model, optimizer, STEPS - 3)
    torch.testing.assert_close(losses + rest[0], wanted_losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norms + rest[1], wanted_norms, atol=1e-4, rtol=1e-4)
    whole = accelerator.get_state_dict(model)
    assert set(whole) == (set(wanted) if rank == 0 else set())
    for name, value in whole.items():
        torch.testing.assert_close(value.cpu(), wanted[name], atol=1e-3, rtol=1e-3, msg=name)
    again, model, optimizer = _prepared(size, cpu)
    again.load_state(f"{folder}/pp")
    torch.testing.assert_close(_steps(again, model, optimizer, STEPS - 3)[0], rest[0])
    model.eval()
    rows = _rows().to(again.device)
    assert model(input_ids=rows).logits.shape == (6, 8, 32)
    _refusals(again, model, rows)
    _stages_that_raise(again, model, rows, rank, size)
    _from_another_engine(size, cpu, folder, rest[0])
    return rest[0]


def _from_another_engine(size, cpu, folder, rest):
    """What one process saved whole goes on in a pipeline."""
    accelerator, model, optimizer = _prepared(size, cpu)
    accelerator.load_state(f"{folder}/whole")
    losses = _steps(accelerator, model, optimizer, STEPS - 3)[0]
    torch.testing.assert_close(losses, rest, atol=1e-4, rtol=1e-4)


def save_whole(rank, size, folder):
    fresh()
    accelerator = Accelerator(cpu=True)
    model = _llama().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    _steps(accelerator, model, optimizer, 3)
    accelerator.save_state(f"{folder}/whole")


def _refusals(accelerator, model, rows):
    model.train()
    with fails(OptionError, "accelerator.train_step", "model.eval()"):
        model(input_ids=rows)
    with fails(OptionError, "train_step", "does not fit a pipeline"):
        accelerator.backward(torch.ones((), requires_grad=True))
    with fails(OptionError, "targets", "loss_function"):
        accelerator.train_step(model, input_ids=rows, targets=rows)
    with fails(ModelError, "another Accelerator"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    with fails(OptionError, "batch of 5", "microbatches=2"):
        accelerator.train_step(model, input_ids=rows[:5], labels=rows[:5])
    with fails(OptionError, "pp_size together with another"):
        both = ParallelismConfig(pp_size=2, tp_size=2)
        Accelerator(cpu=accelerator.device.type == "cpu", parallelism_config=both)


def _stages_that_raise(accelerator, model, rows, rank, size):
    """Each stage in its turn: in a block, in the loss, and before the first block."""

    def fail(*_):
        raise ArithmeticError("too large")

    def step(batch):
        return accelerator.train_step(model, input_ids=batch, labels=batch)

    model.train()
    wanted = step(rows)
    blocks = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
    code = next(m for m in model.modules() if type(m).__name__ == "LlamaModel")
    for victim in range(size):
        for place, batch in ((blocks[0], rows), (code, rows[:4])):
            hook = place.register_forward_pre_hook(fail) if rank == victim else None
            kind, who = (ModelError, f"rank {victim} failed")
            if rank == victim:
                kind, who = ArithmeticError, ""
            with fails(kind, "too large", who):
                step(batch)
            if hook is not None:
                hook.remove()
    torch.testing.assert_close(step(rows), wanted)
    for parameter in model.parameters():
        parameter.grad = None


def goes_on_alone(rank, size, folder):
    """What a pipeline saved, in another engine and on another number of processes."""
    fresh()
    accelerator = make("fsdp2") if size > 1 else Accelerator(cpu=True)
    model = _llama().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.load_state(f"{folder}/pp")
    losses = []
    for _ in range(STEPS - 3):
        loss = accelerator.train_step(model, input_ids=_rows(), labels=_rows())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
