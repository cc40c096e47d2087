"""A transformers model's weights as Megatron's: merged, transposed, and cut in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["Piece", "pieces_of"]

#: Along which dimension a weight is divided over the tensor-parallel processes, by its kind.
_DIVIDED: Final = {"whole": None, "rows": 0, "columns": 1, "qkv": 0, "gated": 0}


@dataclass(frozen=True)
class Piece:
    """One of Megatron's weights, and what it is made of.

    Attributes:
        name: Megatron's, with the layer's number in the whole model.
        sources: the transformers model's names.
        kind: "whole" on each process; "rows" or "columns" of a matrix are divided; "qkv" are
            queries, keys and values, interleaved by groups; "gated" are the gate and the other
            half of a gated unit.
        heads: the number of query heads, and of groups of them that share keys.
        transposed: transformers has the matrices the other way around.
        packed: the sources of "qkv" are one tensor, one after another.
    """

    name: str
    sources: tuple[str, ...]
    kind: str = "whole"
    heads: tuple[int, int] = (1, 1)
    transposed: bool = False
    packed: bool = False

    def cut(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """The part of tensor-parallel process ``rank`` of ``size``, from the sources."""
        tensors = [t.T if self.transposed and t.dim() == 2 else t for t in tensors]
        if self.packed:
            tensors = tensors[0].chunk(3)
        if self.kind == "gated":
            return torch.cat([t.chunk(size)[rank] for t in tensors])
        whole = self._interleave(tensors) if self.kind == "qkv" else tensors[0]
        dimension = _DIVIDED[self.kind]
        return whole if dimension is None else whole.chunk(size, dimension)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sources by name, from the parts of all tensor-parallel processes."""
        if self.kind == "gated":
            halves = [part.chunk(2) for part in parts]
            made = [torch.cat([half[i] for half in halves]) for i in range(2)]
        else:
            dimension = _DIVIDED[self.kind]
            whole = parts[0] if dimension is None else torch.cat(list(parts), dimension)
            made = self._separate(whole) if self.kind == "qkv" else [whole]
        if self.packed:
            made = [torch.cat(made)]
        if self.transposed:
            made = [t.T if t.dim() == 2 else t for t in made]
        return {name: t.contiguous() for name, t in zip(self.sources, made, strict=True)}

    def gather(self, part: torch.Tensor, group: Any) -> dict[str, torch.Tensor]:
        """The sources by name, from this process's part and those of ``group``."""
        if _DIVIDED[self.kind] is None or group.size() == 1:
            return self.join([part])
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return self.join(parts)

    def _interleave(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        groups = self.heads[1]
        by_group = [t.reshape(groups, t.shape[0] // groups, *t.shape[1:]) for t in tensors]
        return torch.cat(by_group, 1).flatten(0, 1)

    def _separate(self, whole: torch.Tensor) -> list[torch.Tensor]:
        heads, groups = self.heads
        by_group = whole.reshape(groups, whole.shape[0] // groups, *whole.shape[1:])
        unit = by_group.shape[1] // (heads // groups + 2)
        sizes = [unit * heads // groups, unit, unit]
        return [t.flatten(0, 1) for t in torch.split(by_group, sizes, 1)]


def pieces_of(config: Any) -> list[Piece]:
    """All of Megatron's weights of a model with a transformers configuration, in order."""
    return _FAMILIES[config.model_type](config)


def _llama(config: Any) -> list[Piece]:
    heads = (config.num_attention_heads, config.num_key_value_heads)
    made = [Piece("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows")]
    for number in range(config.num_hidden_layers):
        here, there = f"decoder.layers.{number}.", f"model.layers.{number}."
        attention = [f"{there}self_attn.{x}_proj." for x in "qkv"]

        def of(*names: str, there: str = there) -> tuple[str, ...]:
            return tuple(f"{there}{name}.weight" for name in names)

        made += [
            Piece(f"{here}input_layernorm.weight", of("input_layernorm")),
            *(
                Piece(
                    f"{here}self_attention.linear_qkv.{what}",
                    tuple(f"{name}{what}" for name in attention),
                    "qkv",
                    heads,
                )
                for what in ("weight", "bias")
            ),
            Piece(f"{here}self_attention.linear_proj.weight", of("self_attn.o_proj"), "columns"),
            Piece(f"{here}pre_mlp_layernorm.weight", of("post_attention_layernorm")),
            Piece(f"{here}mlp.linear_fc1.weight", of("mlp.gate_proj", "mlp.up_proj"), "gated"),
            Piece(f"{here}mlp.linear_fc2.weight", of("mlp.down_proj"), "columns"),
        ]
    return [
        *made,
        Piece("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Piece("output_layer.weight", ("lm_head.weight",), "rows"),
    ]


def _gpt2(config: Any) -> list[Piece]:
    heads = (config.num_attention_heads, config.num_attention_heads)
    made = [
        Piece("embedding.word_embeddings.weight", ("transformer.wte.weight",), "rows"),
        Piece("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    for number in range(config.num_hidden_layers):
        here, there = f"decoder.layers.{number}.", f"transformer.h.{number}."
        for what in ("weight", "bias"):
            # A bias that is added after a sum over the processes is whole on each.
            summed = "columns" if what == "weight" else "whole"
            rows: tuple[tuple[str, str, str], ...] = (
                ("input_layernorm", "ln_1", "whole"),
                ("self_attention.linear_qkv", "attn.c_attn", "qkv"),
                ("self_attention.linear_proj", "attn.c_proj", summed),
                ("pre_mlp_layernorm", "ln_2", "whole"),
                ("mlp.linear_fc1", "mlp.c_fc", "rows"),
                ("mlp.linear_fc2", "mlp.c_proj", summed),
            )
            made += [
                Piece(
                    f"{here}{mine}.{what}",
                    (f"{there}{theirs}.{what}",),
                    kind,
                    heads,
                    transposed=True,
                    packed=kind == "qkv",
                )
                for mine, theirs, kind in rows
            ]
    return [
        *made,
        *(
            Piece(f"decoder.final_layernorm.{what}", (f"transformer.ln_f.{what}",))
            for what in ("weight", "bias")
        ),
        Piece("output_layer.weight", ("lm_head.weight",), "rows"),
    ]


_FAMILIES: Final[dict[str, Callable[[Any], list[Piece]]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "gpt2": _gpt2,
}
