"""Small models for the end-to-end checks, and their answers on the host."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from anydevice_conformance.data import tolerance
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject

__all__ = [
    "Toy",
    "assert_close",
    "caps",
    "checkpoint",
    "exact_toy",
    "ids",
    "import_transformers",
    "saved_transformer",
]

_WIDTH: Final = 32
_WORDS: Final = 64


class Block(nn.Module):
    """A residual block with a buffer and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.full((_WIDTH,), 0.5))
        self.register_buffer("shift", torch.linspace(-1, 1, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., width) to the same."""
        hidden = torch.relu(self.up(self.norm(x) + self.shift))
        result: torch.Tensor = x + self.down(hidden) * self.scale
        return result


class Toy(nn.Module):
    """A small language model in plain torch: embedding, blocks, a head tied to the embedding."""

    def __init__(self, blocks: int = 6, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.embed = nn.Embedding(_WORDS, _WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids of shape (batch, time) to logits of shape (batch, time, words)."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def ids(seed: int = 0, batch: int = 2, time: int = 7) -> torch.Tensor:
    """Token ids, shape (batch, time), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _WORDS, (batch, time), generator=generator)


def exact_toy(seed: int = 0, **options: Any) -> tuple[Toy, Toy]:
    """Two equal models: one to place, one for the host's answer."""
    return Toy(seed=seed, **options), Toy(seed=seed, **options)


def caps(subject: Subject, model: nn.Module, share: float = 0.3) -> dict[int | str, int | str]:
    """Budgets that divide ``model``: a share for each device and the host, the rest for the disk.

    Many devices share what is left of the whole, so that each of them is needed. A device gets
    room for a block that visits it, too, so a cap is a little more than its share.
    """
    total = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    blocks = [b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m]
    largest = max(sum(p.nbytes for p in b.parameters()) for b in [*blocks, *model.children()][:1])
    share = min(share, 0.7 / max(1, len(subject.indices)))
    room = int(total * share) + min(largest, total // 4)
    if subject.is_host:
        return {"cpu": total * 2}
    budgets: dict[int | str, int | str] = {
        str(subject.device(index)): room for index in subject.indices
    }
    budgets["cpu"] = int(total * share)
    return budgets


def checkpoint(model: nn.Module, folder: Path) -> Path:
    """Save a model's weights as its users do; tied ones once."""
    from safetensors.torch import save_file

    tensors = {
        name: t.contiguous() for name, t in model.state_dict().items() if name != "head.weight"
    }
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def import_transformers() -> None:
    """Import what `saved_transformer` needs first, where it can be: for a second, no device."""
    gc.disable()  # imports leave no garbage, and a fifth of their time goes to looking for it
    try:
        importlib.import_module("transformers.models.llama.modeling_llama")
    except ImportError:  # the checks that need it say so
        pass
    finally:
        gc.enable()


def saved_transformer(name: str, folder: Path) -> tuple[Any, Path]:
    """A small random transformers model, and the folder that it was saved to.

    Args:
        name: ``"llama"``, ``"gpt2"`` or ``"t5"``.
        folder: where to save.
    """
    import_transformers()
    try:
        import transformers
    except ImportError:
        left_out("needs transformers: pip install 'anydevice[transformers]'")
    # Typed as anything: the checks run with whatever version of transformers is there.
    common: dict[str, Any] = {
        "vocab_size": _WORDS,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": 1,
    }
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **common,
        )
        kind: Any = transformers.LlamaForCausalLM
    elif name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=_WIDTH, n_layer=3, n_head=4, n_positions=64, **common
        )
        kind = transformers.GPT2LMHeadModel
    else:
        make: Any = transformers.T5Config
        config = make(
            d_model=_WIDTH,
            d_kv=8,
            d_ff=2 * _WIDTH,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            **common,
        )
        kind = transformers.T5ForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = kind(config).eval()
    model.save_pretrained(folder)
    return model, folder


def assert_close(
    subject: Subject, found: torch.Tensor, expected: torch.Tensor, what: str, *, loose: float = 1
) -> None:
    """Whether the device's answer is the host's, within what rounding explains.

    Raises:
        AssertionError: it is not.
    """
    found = subject.fetch(found.detach()).double()
    wanted = expected.detach().double()
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, not {wanted.shape}"
    assert bool(torch.isfinite(found).all()), f"{what}: NaN or infinity, where the host has none"
    scale = wanted.abs().max().clamp(min=1e-6)
    error = ((found - wanted).abs().max() / scale).item()
    allowed = tolerance(expected.dtype) * loose
    assert error <= allowed, (
        f"{what}: off by {error:.2g} of the largest value; {allowed:.2g} is allowed"
    )
