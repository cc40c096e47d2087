"""What a user can choose about DeepSpeed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, Final, cast

from anydevice.arguments import names_unknown_arguments
from anydevice.engines.deepspeed_config import HfDeepSpeedConfig
from anydevice.errors import OptionError

__all__ = ["DeepSpeedPlugin"]

_OFFLOADS: Final = ("none", "cpu", "nvme")


@names_unknown_arguments
@dataclass
class DeepSpeedPlugin:
    """Choices for training with DeepSpeed, and its configuration.

    Args:
        hf_ds_config: DeepSpeed's configuration: a dict, the path of a JSON file, or a
            `HfDeepSpeedConfig`, which it becomes. What it says wins; the other arguments fill in
            what it leaves out or calls "auto".
        gradient_accumulation_steps: batches in one optimizer step.
        gradient_clipping: the largest norm of the gradients.
        zero_stage: 0 to 3; None takes ``ACCELERATE_DEEPSPEED_ZERO_STAGE``, else 2.
        is_train_batch_min: where the configuration does not say the batch size, and loaders of
            several are prepared, whether the smallest is meant; else the largest.
        offload_optimizer_device: "none", "cpu" or "nvme".
        offload_param_device: the same, for stage 3.
        offload_optimizer_nvme_path: a folder.
        offload_param_nvme_path: a folder.
        zero3_init_flag: not there: build the model within ``deepspeed.zero.Init()``.
        zero3_save_16bit_model: gather 16-bit weights when a stage-3 model is saved.
        transformer_moe_cls_names: not there: call ``deepspeed.utils.set_z3_leaf_modules``.

    Raises:
        OptionError: an argument that is not there, or a value that DeepSpeed does not know.

    Example:
        >>> from anydevice import DeepSpeedPlugin
        >>> DeepSpeedPlugin(zero_stage=2).zero_stage
        2
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None

    def __post_init__(self) -> None:
        for name, instead in (
            ("zero3_init_flag", "build the model within deepspeed.zero.Init()"),
            ("transformer_moe_cls_names", "call deepspeed.utils.set_z3_leaf_modules(model, [...])"),
        ):
            if getattr(self, name):
                raise OptionError(f"DeepSpeedPlugin({name}=...) is not there: {instead}")
        if self.zero_stage is None:
            self.zero_stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
        if self.zero_stage not in range(4):
            raise OptionError(f"zero_stage={self.zero_stage!r}: give 0, 1, 2 or 3")
        for name in ("offload_optimizer_device", "offload_param_device"):
            if getattr(self, name) not in (None, *_OFFLOADS):
                raise OptionError(f"{name}={getattr(self, name)!r}: give one of {_OFFLOADS}")
        self.hf_ds_config = self._config()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self._for_transformers: Any = None

    def _config(self) -> HfDeepSpeedConfig:
        """The configuration; an object that the caller goes on to change stays the same object."""
        given = self.hf_ds_config
        made = given if hasattr(given, "config") else HfDeepSpeedConfig(given or {})
        config = made.config
        zero = config.setdefault("zero_optimization", {})
        _fill(zero, "stage", self.zero_stage)
        self.zero_stage = zero["stage"]
        for part in ("optimizer", "param"):
            device = getattr(self, f"offload_{part}_device")
            if device not in (None, "none"):
                offload: dict[str, Any] = {"device": device}
                if (folder := getattr(self, f"offload_{part}_nvme_path")) is not None:
                    offload["nvme_path"] = folder
                _fill(zero, f"offload_{part}", offload)
        _fill(zero, "stage3_gather_16bit_weights_on_model_save", self.zero3_save_16bit_model)
        _fill(config, "gradient_accumulation_steps", self.gradient_accumulation_steps)
        _fill(config, "gradient_clipping", self.gradient_clipping)
        return cast("HfDeepSpeedConfig", made)

    def fill(self, **values: Any) -> None:
        """Put values in the configuration's top level where it says "auto" or nothing."""
        for key, value in values.items():
            _fill(self.deepspeed_config, key, value)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Put values where the configuration says "auto".

        Args:
            prefix: of the names in ``config``: it is a part of the configuration.
            mismatches: gets the names whose values differ, instead of the error.
            config: the part; None is the whole.
            must_match: a value that the configuration has already must be the same.
            **kwargs: values by name, with dots for what is nested: ``"optimizer.params.lr"``.

        Raises:
            OptionError: the configuration has other values; the message names each.

        Example:
            >>> plugin = DeepSpeedPlugin({"optimizer": {"params": {"lr": "auto"}}})
            >>> plugin.deepspeed_config_process(**{"optimizer.params.lr": 0.1})
            >>> plugin.deepspeed_config["optimizer"]
            {'params': {'lr': 0.1}}
        """
        wrong = [] if mismatches is None else mismatches
        config = self.deepspeed_config if config is None else config
        for key, value in config.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{name}.", wrong, value, must_match, **kwargs)
            elif value == "auto":
                _fill(config, key, kwargs.get(name))
            elif must_match and kwargs.get(name, value) != value:
                wrong.append(f"{name}={value!r}, and {kwargs[name]!r} in the script")
        if wrong and mismatches is None:
            raise OptionError(
                f"the DeepSpeed configuration has {'; '.join(wrong)}: say the same in both, or "
                "'auto' in the configuration"
            )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Nothing: an accelerator has one plugin."""

    def is_zero3_init_enabled(self) -> bool:
        """False: a model is built in parts only within ``deepspeed.zero.Init()``."""
        return False

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Have DeepSpeed convert the model to "fp16" or "bf16", unless the configuration says."""
        for name in ("fp16", "bf16"):
            if not isinstance(self.deepspeed_config.get(name), dict):
                self.deepspeed_config[name] = {}
            _fill(self.deepspeed_config[name], "enabled", mixed_precision == name)

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers of the configuration, so that it loads models in parts with stage 3."""
        from transformers.integrations import deepspeed

        known: Any = deepspeed.HfDeepSpeedConfig
        self._for_transformers = known(self.deepspeed_config)

    def zero3_init_context_manager(self, enable: bool = False) -> contextlib.nullcontext[None]:
        """A context in which models are built whole, as everywhere here.

        Raises:
            OptionError: ``enable``.
        """
        if enable:
            raise OptionError("enable=True is not there: build the model in deepspeed.zero.Init()")
        return contextlib.nullcontext()


def _fill(config: dict[str, Any], key: str, value: Any) -> None:
    if value is not None and config.get(key, "auto") == "auto":
        config[key] = value
