"""One run of a model without its weights: which module is called when, and with whose results."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice.errors import ModelError
from anydevice.nested import iter_tensors, map_tensors
from anydevice.weights import iter_slots

__all__ = ["BlockCall", "Trace", "bare_copy", "first_tensor", "to_meta", "trace"]


@dataclasses.dataclass
class BlockCall:
    """How one block was called.

    Attributes:
        block: its full name.
        slot: the argument, by position or keyword, that is the result of the block before; None
            where no argument is that very tensor.
        positions: the arguments that are tensors.
        from_weights: arguments other than ``slot`` that weights were used to compute.
        shapes: the shape and dtype of each tensor argument.
        output: the shape and dtype of the result; None until it has returned.
    """

    block: str
    slot: int | str | None
    positions: tuple[int | str, ...]
    from_weights: tuple[int | str, ...]
    shapes: dict[int | str, tuple[torch.Size, torch.dtype]]
    output: tuple[torch.Size, torch.dtype] | None = None


@dataclasses.dataclass
class Trace:
    """What was called, in order.

    Attributes:
        calls: of the blocks.
        events: full names of blocks and of the other modules that were watched.
    """

    calls: list[BlockCall]
    events: list[str]


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy on meta, which takes no memory; ties and the model are left as they are."""
    memo: dict[int, Any] = {}
    for _, slot in iter_slots(model):
        tensor = slot.get()
        if tensor is not None and id(tensor) not in memo:
            memo[id(tensor)] = _bare(tensor)
    return copy.deepcopy(model, memo)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta").detach()
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def to_meta(data: Any) -> Any:
    """Nested data with each tensor's shape and dtype alone."""
    return map_tensors(lambda tensor: tensor.detach().to("meta"), data)


def first_tensor(output: Any) -> torch.Tensor | None:
    """A block's hidden states: what it returns, or the first of what it returns."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None


def trace(
    bare: nn.Module,
    blocks: Mapping[str, nn.Module],
    watched: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Trace:
    """Run a model that is on meta, and see what is called.

    Blocks that cannot run without values, such as one that sorts tokens by what its router says,
    are taken to return their first argument, alone or in a tuple.

    Args:
        bare: from `bare_copy`.
        blocks: the blocks by name.
        watched: other modules of interest.
        args: for the model; on any device.
        kwargs: more of them.

    Raises:
        ModelError: the model does not run without values.
    """
    failure: Exception | None = None
    for returns in (None, lambda hidden: hidden, lambda hidden: (hidden,)):
        watch = _Watch(bare, blocks, watched, returns)
        try:
            with torch.no_grad(), watch:
                bare(*to_meta(args), **to_meta(dict(kwargs)))
        except Exception as error:  # noqa: BLE001 - a model's code can raise anything
            failure = failure or error
            continue
        return Trace(watch.calls, watch.events)
    raise ModelError(
        f"{type(bare).__name__} cannot be cut: it does not run without its weights' values, which "
        f"tells in what order its modules are called ({type(failure).__name__}: {failure!s:.300}). "
        "Pass example_inputs that it can run on"
    ) from failure


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls, and which tensors depend on weights."""

    def __init__(
        self,
        bare: nn.Module,
        blocks: Mapping[str, nn.Module],
        watched: Mapping[str, nn.Module],
        returns: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[BlockCall] = []
        self.events: list[str] = []
        self._blocks, self._watched, self._returns = blocks, watched, returns
        self._before: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = list(bare.parameters())
        self._stained = {_memory(parameter) for parameter in self._kept}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        for name, module in self._watched.items():
            handle = module.register_forward_pre_hook(
                lambda _module, _args, name=name: self.events.append(name)
            )
            self._undo.append(handle.remove)
        for name, block in self._blocks.items():
            if self._returns is not None:
                block.__dict__["forward"] = self._stub
                self._undo.append(functools.partial(block.__dict__.pop, "forward"))
            handle = block.register_forward_pre_hook(
                lambda _block, args, kwargs, name=name: self._called(name, args, kwargs),
                with_kwargs=True,
            )
            self._undo.append(handle.remove)
            self._undo.append(block.register_forward_hook(self._returned).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        for undo in self._undo:
            undo()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _zero(args[0].dtype)  # as of a check whether some token is padding
        result = function(*args, **(kwargs or {}))
        if any(self._is_stained(tensor) for tensor in iter_tensors((args, kwargs))):
            self._stain(result)
        return result

    def _stub(self, *args: Any, **kwargs: Any) -> Any:
        assert self._returns is not None
        hidden = next(iter_tensors((args, kwargs)))
        result = torch.empty_like(hidden)
        self._stain(result)
        return self._returns(result)

    def _stain(self, data: Any) -> None:
        for tensor in iter_tensors(data):
            self._kept.append(tensor)  # else another tensor could get its memory's address
            self._stained.add(_memory(tensor))

    def _is_stained(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._stained

    def _called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        slot = None
        if self._before is not None:
            slot = next((key for key, value in given.items() if value is self._before), None)
        tensors = {key: v for key, v in given.items() if isinstance(v, torch.Tensor)}
        self.events.append(name)
        self.calls.append(
            BlockCall(
                name,
                slot,
                tuple(tensors),
                tuple(
                    key
                    for key, value in given.items()
                    if key != slot and any(map(self._is_stained, iter_tensors(value)))
                ),
                {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()},
            )
        )

    def _returned(self, _block: nn.Module, _args: Any, output: Any) -> None:
        self._before = first_tensor(output)
        if self._before is not None and self.calls:
            self.calls[-1].output = (self._before.shape, self._before.dtype)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _zero(dtype: torch.dtype) -> bool | int | float:
    """What `torch.Tensor.item` gives of a zero."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
