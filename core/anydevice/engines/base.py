"""What an engine is: how models and optimizers become those of several processes.

An engine is found by name through the entry-point group ``anydevice.engines``, so another package
can bring one. The order of calls is::

    engine = Engine(setup)
    models, optimizers = engine.prepare(models, optimizers)     # once for each `prepare`
    with engine.no_sync(model):                                 # while gradients accumulate
        engine.backward(loss)
    engine.backward(loss)
    engine.clip_grad_norm(parameters, 1.0)
    optimizers[0].step()
    engine.step_was_skipped(optimizers[0])
    engine.state_dict(model); engine.load_state_dict(model, state); engine.unwrap(model)
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from anydevice.engines.precise import Autocast
from anydevice.engines.states import get_state, is_by_name, set_state
from anydevice.processes import PartialState
from anydevice.ties import find_tied_parameters

__all__ = ["Engine", "OwnFiles", "Setup", "clip_grad_norm"]


@dataclasses.dataclass
class Setup:
    """What an engine is told.

    Attributes:
        state: the process, its device and the group.
        autocast: the precision in which models compute.
        scaler: the loss scaler; None where losses are not scaled.
        device_placement: whether models are moved to the device.
        options: plugins and handlers by their class.
        mesh: the processes as a `DeviceMesh`; None where all do the same.

    Example:
        >>> from anydevice import PartialState
        >>> from anydevice.engines import Autocast, Setup, find_engine
        >>> setup = Setup(PartialState(cpu=True), Autocast("cpu"))
        >>> engine = find_engine("single")(setup)
    """

    state: PartialState
    autocast: Autocast
    scaler: Any = None
    device_placement: bool = True
    options: Mapping[type, Any] = dataclasses.field(default_factory=dict)
    mesh: Any = None

    def option(self, kind: type) -> Any:
        """The plugin or handler of class ``kind``; one with defaults where the user gave none."""
        return self.options.get(kind) or kind()


@runtime_checkable
class OwnFiles(Protocol):
    """An engine that reads weights and optimizers from files of its own in a checkpoint.

    All processes call both.

    Example:
        >>> from anydevice.engines import OwnFiles, find_engine
        >>> issubclass(find_engine("deepspeed"), OwnFiles)
        True
    """

    def save_files(self, folder: Path) -> None:
        """Write them."""

    def load_files(self, folder: Path) -> None:
        """Read what `save_files` wrote."""


class Engine(abc.ABC):
    """How models train. Subclasses override what differs; the protocol is these eight methods.

    Attributes:
        name: its name among the entry points ``anydevice.engines``.
        sharded: whether each process holds a part of the weights only: then checkpoints are
            written by all processes, with `torch.distributed.checkpoint`.
        accumulates: whether it divides losses by the number of accumulated batches itself;
            ``backward`` is then told ``boundary``: whether an optimizer step follows.
        own_gradients: whether gradients are in the engine's own buffers, and not in each
            parameter's ``grad``: then they are neither weighed by items nor limited by value.
        elsewhere: keys of the plain model's state that only other processes have.

    Example:
        >>> from anydevice.engines import Engine, find_engine
        >>> issubclass(find_engine("single"), Engine)
        True
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    own_gradients: ClassVar[bool] = False
    elsewhere: Collection[str] = frozenset()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abc.abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Return models and optimizers that train together with the other processes'."""

    @abc.abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``, which is scaled first where losses are."""
        scaler = self.setup.scaler
        (loss if scaler is None else scaler.scale(loss)).backward(**kwargs)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which gradients are not exchanged."""
        return contextlib.nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all processes is at most ``max_norm``.

        Returns:
            The norm before, a plain tensor of no dimension.
        """
        return clip_grad_norm(list(parameters), max_norm, norm_type)

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's last step did nothing, since gradients had overflowed."""
        return bool(getattr(optimizer, "skipped", False))

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, full: bool = True) -> Any:
        """The model's state under the plain model's keys; with ``optimizer``, the optimizer's.

        Args:
            model: a prepared model.
            optimizer: the optimizer whose state is meant.
            full: whole tensors on the host, on the main process only where weights are sharded;
                else each process's part.
        """
        if optimizer is None:
            return self.unwrap(model).state_dict()
        if full:
            return optimizer.state_dict()
        return get_state(self.unwrap(model), optimizer)

    def load_state_dict(
        self, model: nn.Module, state: Any, optimizer: Any = None, **kwargs: Any
    ) -> Any:
        """Take the model's state, or the optimizer's; ``kwargs`` go to the model's own method."""
        if optimizer is not None and is_by_name(state):
            return set_state(self.unwrap(model), state, optimizer)
        if optimizer is not None:
            return optimizer.load_state_dict(state)
        return self.unwrap(model).load_state_dict(state, **kwargs)

    def tied_names(self, model: nn.Module) -> list[list[str]]:
        """Names of one weight in the plain model's state, also where only one of them is here."""
        return find_tied_parameters(self.unwrap(model))


def clip_grad_norm(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for gradients that are parts of larger ones.

    Example:
        >>> import torch
        >>> from anydevice.engines import clip_grad_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm([weight], 1.0, 2.0)
        tensor(5.)
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if all(type(grad) is torch.Tensor for grad in grads):
        whole: torch.Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return whole
    from torch.distributed.tensor import DTensor

    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault(key, []).append(grad)
    norms = []
    for group in groups.values():
        norm = torch.nn.utils.get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        part = grad.to_local() if isinstance(grad, DTensor) else grad
        part.mul_(factor.to(part.device))
    return total
