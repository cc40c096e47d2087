"""Preparing: models, optimizers, loaders and schedulers become those of this run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from anydevice.data import (
    DataLoaderConfiguration,
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)
from anydevice.data.preparing import share_of_data
from anydevice.engines import DeepSpeedPlugin, DummyOptim, DummyScheduler, find_engine
from anydevice.errors import OptionError
from anydevice.training.compiling import TorchDynamoPlugin
from anydevice.training.core import AcceleratorCore
from anydevice.training.deepspeeding import (
    DeepSpeedSchedulerWrapper,
    complete,
    refuse_stand_ins,
)
from anydevice.training.optimizer import AcceleratedOptimizer
from anydevice.training.scheduler import AcceleratedScheduler, SchedulerUnit

__all__ = ["AcceleratorPreparing"]


class AcceleratorPreparing(AcceleratorCore):
    """The preparing of an `Accelerator`."""

    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_unit: SchedulerUnit
    dynamo_plugin: TorchDynamoPlugin
    rng_types: list[Any] | None

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers those of this run.

        All processes call this, with equal things in the same order.

        Args:
            *args: modules, optimizers, `DataLoader` objects and schedulers, in any order;
                anything else is returned as it is.
            device_placement: whether each is put on the device; None is the accelerator's choice.

        Returns:
            The prepared things in the same order; one alone, not in a tuple.

        Raises:
            OptionError: a loader or an optimizer that cannot be prepared.
            ModelError: a model that cannot be trained as it is placed.
            MissingRankError: not all processes call this.
        """
        places = _places(args, device_placement)
        self._look_for_deepspeed(args)
        self.state._partial.meet("prepare", [_kind(thing) for thing in args])
        done: dict[int, Any] = {}
        models = [(i, x) for i, x in enumerate(args) if _kind(x) == "model"]
        optimizers = [(i, x) for i, x in enumerate(args) if _kind(x) == "optimizer"]
        made_models, made_optimizers = self._train(
            [x for _, x in models], [x for _, x in optimizers], [places[i] for i, _ in models]
        )
        done |= {i: made for (i, _), made in zip(models, made_models, strict=True)}
        done |= {i: made for (i, _), made in zip(optimizers, made_optimizers, strict=True)}
        for index, thing in enumerate(args):
            if _kind(thing) == "loader":
                done[index] = self.prepare_data_loader(thing, device_placement=places[index])
            elif _kind(thing) == "scheduler":
                done[index] = self.prepare_scheduler(thing)
        result = tuple(done.get(index, thing) for index, thing in enumerate(args))
        return result[0] if len(result) == 1 else result

    def _look_for_deepspeed(self, things: Sequence[Any]) -> None:
        """Tell DeepSpeed's configuration of them; without DeepSpeed its stand-ins are refused."""
        plugin = self.engine.setup.options.get(DeepSpeedPlugin)
        if plugin is None:
            refuse_stand_ins(things)
        elif any(_kind(thing) == "model" for thing in things):
            complete(plugin, things, self.gradient_state)
            for schedule in things:
                if isinstance(schedule, DummyScheduler):
                    setup = self.engine.setup
                    setup.options = {**setup.options, DummyScheduler: schedule}

    def _train(
        self, models: list[nn.Module], optimizers: list[Any], places: list[bool | None]
    ) -> tuple[list[nn.Module], list[AcceleratedOptimizer]]:
        """The engine's models, compiled, and its optimizers."""
        known = {id(model) for model in self._models}
        new = [model for model in models if id(model) not in known]
        fresh = [o for o in optimizers if not isinstance(o, AcceleratedOptimizer)]
        earlier = [optimizer.optimizer for optimizer in self._optimizers]
        place = next((p for p in places if p is not None), None)
        with self._placing(place):
            made, stepping = self.engine.prepare(new, [*fresh, *earlier])
        made = [self.dynamo_plugin.compile(model) for model in made]
        self._models += made
        by_id = {id(old): now for old, now in zip(new, made, strict=True)}
        wrapped = {id(o): self._wrap(now) for o, now in zip(fresh, stepping, strict=False)}
        return (
            [by_id.get(id(model), model) for model in models],
            [wrapped.get(id(optimizer), optimizer) for optimizer in optimizers],
        )

    def _wrap(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        self._check_parameters(optimizer)
        made = AcceleratedOptimizer(optimizer, self.device_placement, self._loss_scaler)
        made.before_step = self._finish_weighing
        self._optimizers.append(made)
        return made

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer has the parameters of a sharded model, and not those before."""
        if not self.engine.sharded or not self._models:
            return
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for model in self._models for p in model.parameters()}
        if not any(id(p) in known for p in mine):
            raise OptionError(
                "the optimizer has the parameters from before the model was sharded. Prepare both "
                "in one call: model, optimizer = accelerator.prepare(model, optimizer); or make "
                "the optimizer from the prepared model's parameters"
            )

    @contextlib.contextmanager
    def _placing(self, place: bool | None) -> Iterator[None]:
        setup = self.engine.setup
        before = setup.device_placement
        setup.device_placement = before if place is None else place
        try:
            yield
        finally:
            setup.device_placement = before

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare one model; with ``evaluation_mode`` it exchanges no gradients."""
        if not evaluation_mode or self.engine.sharded:
            return self._train([model], [], [device_placement])[0][0]
        with self._placing(device_placement):
            alone = find_engine("single")(self.engine.setup)
            state = alone.setup.state
            if state.num_processes == 1 or not hasattr(model, "hf_device_map"):
                model = alone.prepare([model], [])[0][0]
        self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; with sharded weights, prepare it together with its model."""
        return self._train([], [optimizer], [device_placement])[1][0]

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler, after its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        if isinstance(scheduler, DummyScheduler):
            own = getattr(self._models[0], "lr_scheduler", None)
            return DeepSpeedSchedulerWrapper(own, list(self._optimizers))
        of = getattr(scheduler, "optimizer", None)
        mine = [o for o in self._optimizers if of is not None and of in (o, o.optimizer)]
        made = AcceleratedScheduler(
            scheduler,
            mine or list(self._optimizers),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            unit=self.scheduler_unit,
            num_processes=share_of_data(mesh=self.torch_device_mesh)[0],
        )
        self._schedulers.append(made)
        return made

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader; see `anydevice.data_loader.prepare_data_loader`."""
        if isinstance(data_loader, PreparedLoader):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        config = self.dataloader_config
        made = prepare_data_loader(
            data_loader,
            self.device,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=self.torch_device_mesh,
        )
        self._dataloaders.append(made)
        return made

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
        """A loader without its first batches; see `anydevice.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    # ------------------------------------------------------------------ choices about loaders

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.use_stateful_dataloader


def _places(args: Sequence[Any], given: Sequence[bool] | None) -> list[bool | None]:
    if given is None:
        return [None] * len(args)
    if len(given) != len(args):
        raise OptionError(
            f"device_placement has {len(given)} entries for {len(args)} things to prepare"
        )
    return list(given)


def _kind(thing: Any) -> str:
    """What a thing is to `prepare`: "model", "optimizer", "loader", "scheduler" or "other"."""
    if isinstance(thing, DataLoader):
        return "loader"
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, (torch.optim.Optimizer, DummyOptim)):
        return "optimizer"
    is_scheduler = isinstance(
        thing, (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler, DummyScheduler)
    )
    looks_like = (
        hasattr(thing, "optimizer") and hasattr(thing, "step") and hasattr(thing, "get_last_lr")
    )
    return "scheduler" if is_scheduler or looks_like else "other"
