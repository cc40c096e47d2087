"""Training loops that ranks and tests run: a plain one, and the same through `Accelerator`."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anydevice.engines import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelConfig,
)
from anydevice.training import Accelerator, AcceleratorState, GradientState

STEPS = 20
BATCH = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Some blocks, and a plan for tensor parallelism."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self, blocks=2):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data(count=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x.flip(1) * 0.5)


def fresh():
    """A process as if no accelerator had been made in it."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)


def parts(blocks=2):
    torch.manual_seed(0)
    model = Net(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def plain_loop(batch, steps=STEPS, clip=1.0, blocks=2, count=16):
    """Losses and the final weights of an ordinary loop."""
    model, optimizer = parts(blocks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    losses = []
    while len(losses) < steps:
        for x, y in DataLoader(data(count), batch):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def make(engine, precision="no", accumulation=1, cpu=True, **options):
    """An accelerator for an engine by a short name."""
    if engine.startswith("fsdp2"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            reshard_after_forward="zero2" not in engine,
            activation_checkpointing="ac" in engine,
            cpu_offload="offload" in engine,
            forward_prefetch="prefetch" in engine,
        )
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if "hsdp" in engine:
        options["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=2, dp_shard_size=size // 2
        )
    elif engine == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=size)
    elif engine == "pp":
        handler = PipelineParallelConfig(
            schedule="gpipe" if accumulation > 1 else "1f1b", example_inputs=torch.zeros(2, 4)
        )
        options["parallelism_config"] = ParallelismConfig(pp_size=size, pp_handler=handler)
    elif engine == "tp+fsdp2":
        options["parallelism_config"] = ParallelismConfig(tp_size=2, dp_shard_size=size // 2)
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        scheduler_unit="steps",
        **options,
    )


def prepared_loop(
    accelerator, batch=BATCH, steps=STEPS, clip=1.0, stop=None, resume=None, count=16
):
    """The same loop through an accelerator; losses are the means over all that one step used."""
    whole = accelerator.engine.name == "pp"  # forward and backward are one call
    model, optimizer = parts(4 if whole else 2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    loader = DataLoader(data(count), batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, part = [], []
    if resume is not None:
        accelerator.load_state(resume)
        losses = [None] * stop
    while len(losses) < steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                if whole:
                    loss = accelerator.train_step(
                        model, x, targets=y, loss_function=nn.functional.mse_loss
                    )
                else:
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            part.append(loss.detach())
            if accelerator.sync_gradients:
                losses.append(torch.stack(part).mean())
                part = []
            if len(losses) == steps:
                break
            if stop is not None and resume is None and len(losses) == stop and not part:
                return losses, (model, optimizer, loader, scheduler)
    done = [None] * (stop or 0) if resume is not None else []
    means = accelerator.reduce(torch.stack(losses[len(done) :]), "mean").tolist()
    return done + means, accelerator.get_state_dict(model)


def close(found, wanted, tolerance, what=""):
    """How far losses and weights are apart at most; an error names what is too far."""
    losses, weights = found
    wanted_losses, wanted_weights = wanted
    for number, (a, b) in enumerate(zip(losses, wanted_losses, strict=True)):
        assert a is None or abs(a - b) <= tolerance * max(1, abs(b)), (what, number, a, b)
    if weights:
        assert set(weights) == set(wanted_weights), (sorted(weights), sorted(wanted_weights))
        for name, value in weights.items():
            torch.testing.assert_close(
                value.cpu().float(),
                wanted_weights[name],
                atol=tolerance,
                rtol=tolerance,
                msg=f"{what} {name}",
            )


@contextlib.contextmanager
def fails(kind, *words):
    """The body raises ``kind`` with all ``words`` in its message."""
    raised = None
    try:
        yield
    except kind as error:
        raised = str(error)
    assert raised is not None, f"no {kind.__name__}"
    missing = [word for word in words if word not in raised]
    assert not missing, f"{missing} not in: {raised}"
