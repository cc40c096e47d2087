"""DeepSpeed's configuration as programs read it, and the parts that DeepSpeed makes from it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.errors import OptionError

__all__ = ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose nested values are found by names with dots.

    Args:
        config_file_or_dict: the path of a JSON file, or a dict, which is copied.

    Attributes:
        config: the configuration, as DeepSpeed takes it.

    Raises:
        OptionError: there is no such file, or no configuration in it.

    Example:
        >>> from anydevice.utils import HfDeepSpeedConfig
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.is_zero3(), config.get_value("zero_optimization.stage")
        (True, 3)
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dict that holds a value, and the value's key in it.

        Args:
            ds_key_long: such as ``"optimizer.params.lr"``.

        Returns:
            None for the dict, where the configuration has none on that way.
        """
        *parts, key = ds_key_long.split(".")
        node: Any = self.config
        for part in parts:
            node = node.get(part)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of that name; ``default`` where there is none."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Take a value, or a part of the configuration, out.

        Raises:
            OptionError: ``must_exist``, and there is none.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise OptionError(f"the DeepSpeed configuration has no {ds_key_long!r} to take out")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether there is such a value, and it is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether there is such a value, and it is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    @property
    def stage(self) -> Any:
        """The ZeRO stage: 0 to 3; -1 where the configuration names none."""
        return self.get_value("zero_optimization.stage", -1)

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer state are sharded, and weights are not."""
        return bool(self.stage == 2)

    def is_zero3(self) -> bool:
        """Whether weights are sharded too."""
        return bool(self.stage == 3)

    def is_offload(self) -> bool:
        """Whether weights or optimizer state rest on the host or a disk."""
        return self.stage in (2, 3) and any(
            self.get_value(f"zero_optimization.offload_{part}.device") in ("cpu", "nvme")
            for part in ("optimizer", "param")
        )


class DummyOptim:
    """The place of an optimizer that DeepSpeed makes, by the configuration's ``optimizer``.

    Args:
        params: the model's parameters.
        lr: fills in ``optimizer.params.lr`` where the configuration says "auto".
        weight_decay: the same for ``optimizer.params.weight_decay``.
        **kwargs: more of ``optimizer.params``, filled in the same way.

    Example:
        >>> import torch
        >>> from anydevice.utils import DummyOptim
        >>> optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        >>> optimizer.lr
        0.1
    """

    def __init__(
        self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = params if isinstance(params, list) else list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """The place of a schedule that DeepSpeed makes or steps.

    Args:
        optimizer: of the schedule; it may be a `DummyOptim`.
        total_num_steps: fills in ``scheduler.params.total_num_steps`` where that is "auto".
        warmup_num_steps: the same for ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: makes the schedule from DeepSpeed's optimizer, where the
            configuration has no ``scheduler``.
        **kwargs: more of ``scheduler.params``, filled in the same way.

    Example:
        >>> import torch
        >>> from anydevice.utils import DummyOptim, DummyScheduler
        >>> optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters())
        >>> DummyScheduler(optimizer, total_num_steps=100).total_num_steps
        100
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if not isinstance(given, (str, os.PathLike)):
        raise OptionError(
            f"a DeepSpeed configuration is a dict or the path of a JSON file, not a "
            f"{type(given).__name__}"
        )
    path = Path(given)
    if not path.exists():
        raise OptionError(f"hf_ds_config={os.fspath(given)!r}: there is no such file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"hf_ds_config={os.fspath(given)!r} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise OptionError(f"hf_ds_config={os.fspath(given)!r} holds no JSON object")
    return config
