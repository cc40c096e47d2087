"""Megatron-LM: asked for by its plugin, and refused with what to do instead."""

from __future__ import annotations

import importlib.util
from typing import Any

from anydevice.engines.base import Setup
from anydevice.engines.single import SingleEngine
from anydevice.errors import MissingDependencyError, OptionError

__all__ = ["MegatronLMEngine", "MegatronLMPlugin"]


class MegatronLMPlugin:
    """Choices for Megatron-LM, by the names of the reference; kept as they are given.

    Example:
        >>> MegatronLMPlugin(tp_degree=2).tp_degree
        2
    """

    def __init__(self, tp_degree: int | None = None, pp_degree: int | None = None, **kwargs: Any):
        self.tp_degree = tp_degree
        self.pp_degree = pp_degree
        vars(self).update(kwargs)


class MegatronLMEngine(SingleEngine):
    """Refuses: Megatron-LM builds the model, its optimizer and its data by itself.

    Raises:
        MissingDependencyError: Megatron-LM is not installed.
        OptionError: it is.
    """

    name = "megatron_lm"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        instead = (
            "For tensor parallelism of an ordinary model: "
            "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., dp_shard_size=...))"
        )
        if importlib.util.find_spec("megatron") is None:
            raise MissingDependencyError(
                f"MegatronLMPlugin needs Megatron-LM: pip install megatron-core. {instead}"
            )
        raise OptionError(
            "MegatronLMPlugin: Megatron-LM trains models that it builds itself, with its own "
            f"pretrain(), and no engine here runs them. {instead}"
        )
