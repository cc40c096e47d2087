"""Small models of the usual kinds, whose blocks are gone through in each way that training has."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["NETS", "Blocks", "arguments_of", "built", "loss_of"]

functional: Any = nn.functional
#: Kinds of models.
NETS: Final = ("tokens", "images", "series")
_WORDS: Final = 11


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 8, padding_idx=0)
        self.places = nn.Parameter(torch.randn(6, 8) / 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(given) + self.places
        return found


class _Attention(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice  # the host's attention has no second derivative
        self.norm, self.whole, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        parts = self.whole(self.norm(given)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.twice:
            query, key, value = parts
            found = (query @ key.mT / 2).softmax(-1).to(value.dtype) @ value
        else:
            found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        result: torch.Tensor = given + self.out(found.transpose(1, 2).flatten(2))
        return result


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = given + self.down(functional.gelu(self.up(self.norm(given))))
        return result


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 8, batch_first=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cells(given)[0]
        return found


class Blocks(nn.Module):
    """Blocks one after the other.

    Attributes:
        ways: how they are gone through.
        places: the device of each.
        noted: what hooks saw.
    """

    def __init__(self, blocks: list[nn.Module], ways: tuple[str, ...], places: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(b.to(p) for b, p in zip(blocks, places, strict=True))
        self.ways, self.places = ways, places
        self.noted: list[torch.Tensor] = []
        self.own = _cubes(places[0].type) if "own function" in ways else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Go through all blocks."""
        for number, block in enumerate(self.blocks):
            given = given.to(self.places[number])
            given = self._through(block, given) if number == 1 else block(given)
            if number == 0:
                if self.own is not None:
                    given = self.own.apply(given)
                if "hooks" in self.ways and given.requires_grad:
                    given.register_hook(self._seen)  # type: ignore[no-untyped-call]
        return given

    def _through(self, block: nn.Module, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        with contextlib.ExitStack() as stack:
            if "kept on the host" in self.ways:
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            if "without autocast inside" in self.ways:
                stack.enter_context(torch.autocast(given.device.type, enabled=False))
                given = given.float()
            for way, old in (("computed again", False), ("computed again, reentrant", True)):
                if way in self.ways and torch.is_grad_enabled():
                    again: Any = checkpoint
                    found = again(block, given, use_reentrant=old)
                    break
            else:
                found = block(given)
        if "without autocast inside" in self.ways:
            assert found.dtype is torch.float32, f"with autocast disabled it gave {found.dtype}"
        return found

    def _seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.noted.append(gradient.detach().float().abs().sum())
        return gradient * 2


def _cubes(device_type: str) -> Any:
    amp: Any = torch.amp
    as_float32 = amp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)

    class _Cubes(torch.autograd.Function):
        """A function of a user's, which computes in float32."""

        @staticmethod
        @as_float32  # type: ignore[untyped-decorator]
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            assert given.dtype is torch.float32, f"custom_fwd gave {given.dtype}, not float32"
            ctx.save_for_backward(given)
            return given + given**3 / 8

        @staticmethod
        @amp.custom_bwd(device_type=device_type)  # type: ignore[untyped-decorator]
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (given,) = ctx.saved_tensors
            result: torch.Tensor = gradient * (1 + 3 * given**2 / 8)
            return result

    return _Cubes


def built(net: str, ways: tuple[str, ...], places: list[torch.device]) -> Blocks:
    """A model of a kind, with the same weights each time; its blocks by turns on ``places``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        if net == "tokens":
            first: nn.Module = _Words()
            blocks = [first, _Attention("penalty" in ways), _Perceptron(), nn.Linear(8, _WORDS)]
        elif net == "images":
            first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
            inner = nn.Sequential(nn.Conv2d(4, 8, 3, 2, groups=2), nn.GroupNorm(2, 8), nn.SiLU())
            last = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(32, 3))
            blocks = [first, inner, last]
        else:
            inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus())
            blocks = [_Recurrent(), inner, nn.Linear(8, 2)]
    made = Blocks(blocks, ways, [places[n % 2] for n in range(len(blocks))])
    if "frozen" in ways:
        for number, parameter in enumerate(made.parameters()):
            parameter.requires_grad_(number % 3 != 1)
    if "channels-last" in ways and net == "images":
        made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made


def arguments_of(net: str, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its targets, on the host."""
    dice = torch.Generator().manual_seed(turn)
    if net == "tokens":
        words = torch.randint(0, _WORDS, (3, 6), generator=dice)
        targets = words.roll(1, 1)
        targets[0, :2] = -100
        return words, targets
    if net == "images":
        images = torch.randn(3, 2, 8, 8, generator=dice)
        return images, torch.rand(3, 3, generator=dice).round()
    return torch.randn(2, 5, 3, generator=dice), torch.randn(2, 5, 2, generator=dice)


def loss_of(net: str, found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss, in float32."""
    loss: torch.Tensor
    if net == "tokens":
        loss = functional.cross_entropy(found.float().mT, targets, label_smoothing=0.1)
    elif net == "images":
        loss = functional.binary_cross_entropy_with_logits(found.float(), targets)
    else:
        loss = functional.smooth_l1_loss(found.float(), targets)
    return loss
