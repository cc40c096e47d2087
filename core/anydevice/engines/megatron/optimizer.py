"""A torch optimizer whose steps are Megatron's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from anydevice.engines.megatron.device import MegatronDevice
from anydevice.errors import OptionError

__all__ = ["MegatronOptimizer", "build_optimizer"]

_GROUP = "anydevice_group"  # in Megatron's parameter groups: the number of the user's


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer as fields of Megatron's `OptimizerConfig`.

    Raises:
        OptionError: one that Megatron has not.
    """
    group = optimizer.param_groups[0]
    for name in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(g.get(name) for g in optimizer.param_groups):
            raise OptionError(
                f"MegatronLMPlugin: the optimizer's {name}={group.get(name)!r} has no counterpart "
                "in Megatron's: leave it out"
            )
    made: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay")
        return made | {
            "optimizer": "adam",
            "adam_beta1": float(group["betas"][0]),
            "adam_beta2": float(group["betas"][1]),
            "adam_eps": group["eps"],
            "decoupled_weight_decay": bool(decoupled),
        }
    if type(optimizer) is torch.optim.SGD:
        return made | {"optimizer": "sgd", "sgd_momentum": group["momentum"]}
    raise OptionError(
        f"MegatronLMPlugin: Megatron has no {type(optimizer).__name__}: use torch.optim.AdamW, "
        "Adam or SGD"
    )


def build_optimizer(
    optimizer: torch.optim.Optimizer,
    running: Any,
    numbers: Mapping[nn.Parameter, int],
    arguments: dict[str, Any],
) -> Any:
    """Megatron's optimizer in the place of torch's.

    Args:
        optimizer: the user's.
        running: Megatron's `DistributedDataParallel`.
        numbers: the user's parameter group of each of this process's parameters.
        arguments: further fields of Megatron's `OptimizerConfig`.
    """
    package: Any = importlib.import_module("megatron.core.optimizer")
    choices: Any = importlib.import_module("megatron.core.optimizer.optimizer_config")
    overrides = {}
    for number in range(len(optimizer.param_groups)):
        mine = choices.ParamPredicate(
            f"group {number}", lambda parameter, number=number: numbers.get(parameter) == number
        )
        overrides[choices.ParamKey(predicate=mine)] = {_GROUP: number}
    config = package.OptimizerConfig(**_arguments(optimizer) | arguments)
    return package.get_megatron_optimizer(
        config, [running], config_overrides=overrides, use_gloo_process_groups=False
    )


class MegatronOptimizer:
    """The face of the user's optimizer: its groups say rates and decays, Megatron's steps.

    Attributes:
        param_groups: the user's own, with the transformers model's parameters.
        skipped: whether the last step did nothing, since gradients had overflowed.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, made: Any, running: Any, here: MegatronDevice
    ) -> None:
        self._optimizer, self._made = optimizer, made
        self._running, self._here = running, here
        self._clipping = made.config.clip_grad
        self._factor: float | None = None
        self._pending = False
        #: What losses hang on, so that they have a backward.
        self.anchor = torch.zeros((), requires_grad=True)
        self.skipped = False

    def begin_batch(self) -> None:
        """Gradients of another batch are added from here on.

        Raises:
            OptionError: the last batch's loss got no backward, and others of the step did.
        """
        if self._pending and self._factor is not None:
            raise OptionError(
                "MegatronLMPlugin: a loss got no backward, and its gradients are among those of "
                "this step: call accelerator.backward(loss) for each, or evaluate with "
                "model.eval()"
            )
        if self._pending:
            self.forget()
        self._pending = True

    def weigh(self, factor: float) -> None:
        """Say how much the last batch's loss counts within the step.

        Raises:
            OptionError: batches of one step count differently, or one counts twice.
        """
        if not self._pending:
            raise OptionError(
                "MegatronLMPlugin: backward of a loss that has had one, or that is not the last "
                "one: call the model once for each backward"
            )
        self._pending = False
        if self._factor is not None and self._factor != factor:
            raise OptionError(
                "MegatronLMPlugin: the losses of one optimizer step have different weights "
                f"({self._factor:g} and {factor:g}): Megatron adds their gradients. Give all the "
                "same"
            )
        self._factor = factor

    def prepare(self) -> bool:
        """Apply the weight to the gradients; False where no backward was called."""
        if self._factor is None:
            return False
        if self._factor != 1.0:
            self._running.scale_gradients(self._factor)
            self._factor = 1.0
        return True

    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the next step clip the gradient to ``max_norm``; its norm is returned."""
        if not self.prepare():
            return torch.zeros(())
        with self._here.working():
            self._made.prepare_grads()
            norm = self._made.get_grad_norm()
        for part in self._parts():
            part.config.clip_grad = max_norm
        return torch.as_tensor(norm)

    def step(self, closure: Any = None) -> None:
        """One step of Megatron's optimizer, with the rates of the user's groups.

        Raises:
            OptionError: a closure.
        """
        if closure is not None:
            raise OptionError(
                "MegatronLMPlugin: Megatron's optimizer takes no closure: leave it out"
            )
        if not self.prepare():
            return
        for group in self._made.param_groups:
            if _GROUP in group:
                theirs = self._optimizer.param_groups[group[_GROUP]]
                for name in ("lr", "weight_decay", "betas", "eps", "momentum"):
                    if name in group and name in theirs:
                        group[name] = theirs[name]
        with self._here.working():
            self.skipped = not self._made.step()[0]
        vars(self._optimizer)["_opt_called"] = True  # schedulers warn where it never stepped
        for part in self._parts():
            part.config.clip_grad = self._clipping
        self.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.forget()

    def forget(self) -> None:
        """Clear Megatron's buffers of gradients."""
        self._factor, self._pending = None, False
        with self._here.working():
            self._running.zero_grad_buffer()
            self._made.zero_grad()

    def state_dict(self, *args: Any) -> dict[str, Any]:
        """Refused: each process has a part.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "MegatronLMPlugin: each process has a part of the optimizer's state: "
            "save_state(folder) and load_state(folder) write and read it whole"
        )

    load_state_dict = state_dict

    def read(self, parameter: nn.Parameter, name: str) -> torch.Tensor:
        """What Megatron keeps of one of this process's parameters, as a tensor of its shape.

        All data-parallel processes call this together.

        Args:
            parameter: one of this process's.
            name: of the state; "main" is the copy in float32 of a parameter in less.
        """
        entry, lies, part = self._entry(parameter)
        value = entry.get(name)
        if lies is None and value is not None:
            kept: torch.Tensor = value.detach().view(parameter.shape)
            return kept
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if lies is not None:
            if value is not None:
                whole[lies] = value.detach().view(-1)
            torch.distributed.all_reduce(whole, group=part.data_parallel_group)
        return whole.view(parameter.shape)

    def write(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor], step: Any) -> None:
        """Take what `read` gave, and how many steps were made."""
        entry, lies, part = self._entry(parameter)
        main = entry.get("main")
        if main is None:
            return
        kept = part.optimizer.state[main]
        for name in self._names(parameter):
            if name not in states:
                continue
            value = states[name].to(main.device, torch.float32).reshape(-1)
            value = (value if lies is None else value[lies]).view(main.shape)
            if name == "main":
                main.data.copy_(value)
            else:
                kept[name] = value.clone()
        if step is not None and type(part.optimizer).__module__.startswith("torch."):
            kept["step"] = torch.tensor(float(step))
        elif step is not None:  # fused optimizers count for all parameters at once
            for group in part.optimizer.param_groups:
                group["step"] = int(step)

    def reload(self) -> None:
        """Take the model's weights anew, where it keeps copies of them."""
        self._made.reload_model_params()

    def state_names(self, parameters: Iterable[nn.Parameter]) -> set[str]:
        """The states that there are of any of the parameters."""
        found = set()
        for parameter in parameters:
            entry = self._entry(parameter)[0]
            found |= {n for n in self._names(parameter) if entry.get(n) is not None}
        return found

    def steps(self) -> float | None:
        """How many steps were made; None where the optimizer does not count."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                if "step" in group:
                    return float(group["step"])
                for main in group["params"]:
                    if "step" in part.optimizer.state.get(main, {}):
                        return float(part.optimizer.state[main]["step"])
        return None

    def _names(self, parameter: nn.Parameter) -> list[str]:
        adam = type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        names = ["exp_avg", "exp_avg_sq"] if adam else ["momentum_buffer"]
        return names if parameter.dtype == torch.float32 else [*names, "main"]

    def _entry(self, parameter: nn.Parameter) -> tuple[dict[str, Any], slice | None, Any]:
        """What is kept here of a parameter, where it lies in it (None: it is all), and by whom."""
        (part,) = self._parts()
        if not hasattr(part, "model_param_group_index_map"):
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
            return {**part.optimizer.state.get(main, {}), "main": main}, None, part
        if parameter not in part.model_param_group_index_map:
            return {}, slice(0, 0), part
        group, place = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][place]
        lies = part._get_model_param_range_map(parameter)["param"]
        return (
            {**part.optimizer.state.get(main, {}), "main": main},
            slice(lies.start, lies.end),
            part,
        )

    def _parts(self) -> list[Any]:
        return list(getattr(self._made, "chained_optimizers", [self._made]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)
