"""What a user can choose about fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError

__all__ = ["FullyShardedDataParallelPlugin"]

_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_POLICIES: Final = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STRATEGIES: Final = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
#: What torch's first FSDP had and `fully_shard` has not, with what to do instead.
_GONE: Final = {
    "state_dict_config": "checkpoints follow from state_dict_type",
    "optim_state_dict_config": "checkpoints follow from state_dict_type",
}


@names_unknown_arguments
@dataclass
class FullyShardedDataParallelPlugin:
    """Choices for sharding weights, gradients and optimizer state with torch's `fully_shard`.

    Args:
        fsdp_version: 2, the only one there is here.
        sharding_strategy: the old name for ``reshard_after_forward``: FULL_SHARD (True),
            SHARD_GRAD_OP (False); HYBRID_SHARD and HYBRID_SHARD_ZERO2 shard within a machine and
            replicate across machines.
        reshard_after_forward: whether gathered weights are freed after a block's forward.
        backward_prefetch: only ``"BACKWARD_PRE"``, which `fully_shard` always does.
        mixed_precision_policy: a `MixedPrecisionPolicy`, a dict of its arguments, or "fp16",
            "bf16" or "fp32" for all; None follows the accelerator's ``mixed_precision``.
        auto_wrap_policy: which modules are sharded as units: a function of ``module``,
            ``recurse`` and ``nonwrapped_numel`` as torch's policies are; or
            "transformer_based_wrap", "size_based_wrap" or "no_wrap". None finds the model's
            blocks.
        cpu_offload: keep weights, gradients and optimizer state in the host's memory; or an
            `OffloadPolicy`.
        ignored_modules: modules that are not sharded, or a regular expression of their names.
        state_dict_type: "FULL_STATE_DICT" or "SHARDED_STATE_DICT" (the default): what
            `save_state` writes.
        limit_all_gathers: only True, which `fully_shard` always does.
        use_orig_params: only True, which `fully_shard` always does.
        param_init_fn: called with each module whose weights have no values yet.
        sync_module_states: start from the main process's weights; None means True.
        forward_prefetch: gather the next block's weights during a block's forward.
        activation_checkpointing: compute each block's activations again in backward.
        activation_checkpointing_offload: not there; ``activation_checkpointing`` is.
        cpu_ram_efficient_loading: only the main process has values; the others' models may be on
            the meta device.
        transformer_cls_names_to_wrap: class names, for "transformer_based_wrap"; a list, or a
            string with commas between.
        min_num_params: parameters a unit has at least, for "size_based_wrap".

    Raises:
        OptionError: an argument that `fully_shard` cannot do, with what to do instead.

    Example:
        >>> from anydevice import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(cpu_offload=True).reshard_after_forward
        True
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: (
        Callable[..., bool] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None
    ) = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    #: Replicate across machines and shard within each; set by ``sharding_strategy``.
    hybrid = False

    def __post_init__(self) -> None:
        self._refuse()
        self._resharding()
        self.set_state_dict_type()
        self._wrapping()
        self.fsdp_version = 2
        if self.cpu_ram_efficient_loading and self.sync_module_states is False:
            raise OptionError(
                "cpu_ram_efficient_loading=True gives only the main process values, so "
                "sync_module_states must not be False"
            )
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy)
        elif isinstance(self.mixed_precision_policy, dict):
            self.mixed_precision_policy = _policy(**self.mixed_precision_policy)
        self.validate_mixed_precision_policy()

    def _refuse(self) -> None:
        wrong: dict[str, str] = {}
        if self.fsdp_version not in (None, 2):
            wrong["fsdp_version"] = "give 2 (torch's fully_shard), or leave it out"
        if self.use_orig_params is False:
            wrong["use_orig_params"] = "parameters always stay the originals: leave it out"
        if self.limit_all_gathers is False:
            wrong["limit_all_gathers"] = "fully_shard always limits them: leave it out"
        if self.activation_checkpointing_offload:
            wrong["activation_checkpointing_offload"] = "use activation_checkpointing=True"
        prefetch = getattr(self.backward_prefetch, "name", self.backward_prefetch)
        if prefetch not in (None, "BACKWARD_PRE"):
            wrong["backward_prefetch"] = "fully_shard always does BACKWARD_PRE: leave it out"
        for name, instead in _GONE.items():
            if getattr(self, name) is not None:
                wrong[name] = instead
        if wrong:
            name, instead = next(iter(wrong.items()))
            raise OptionError(
                f"FullyShardedDataParallelPlugin({name}={getattr(self, name)!r}): {instead}"
            )

    def _resharding(self) -> None:
        given = self.sharding_strategy
        if isinstance(self.reshard_after_forward, str):
            given, self.reshard_after_forward = self.reshard_after_forward, None
        if given is not None:
            name = str(getattr(given, "name", given)).upper()
            if name not in _STRATEGIES:
                raise OptionError(
                    f"sharding_strategy={given!r}: give one of {', '.join(_STRATEGIES)}; for "
                    "NO_SHARD, leave the plugin out: models are then replicated"
                )
            reshard, self.hybrid = _STRATEGIES[name]
            if self.reshard_after_forward is None:
                self.reshard_after_forward = reshard
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        if not isinstance(self.reshard_after_forward, (bool, int)):
            raise OptionError(
                f"reshard_after_forward={self.reshard_after_forward!r}: give True or False"
            )

    def _wrapping(self) -> None:
        policy = self.auto_wrap_policy
        if isinstance(policy, str):
            if policy.lower() not in _POLICIES:
                raise OptionError(
                    f"auto_wrap_policy={policy!r}: give a function or one of {', '.join(_POLICIES)}"
                )
            self.auto_wrap_policy = policy.lower()  # type: ignore[assignment]
        if self.auto_wrap_policy == "size_based_wrap" and self.min_num_params is None:
            raise OptionError("auto_wrap_policy='size_based_wrap' needs min_num_params")
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str):  # as transformers' Trainer says it
            names = [name.strip() for name in names.split(",") if name.strip()]
            self.transformer_cls_names_to_wrap = names
        if names is not None and self.auto_wrap_policy not in (None, "transformer_based_wrap"):
            raise OptionError(
                "transformer_cls_names_to_wrap needs auto_wrap_policy='transformer_based_wrap'"
            )
        if self.min_num_params is not None and self.auto_wrap_policy != "size_based_wrap":
            raise OptionError("min_num_params needs auto_wrap_policy='size_based_wrap'")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose what `save_state` writes.

        Raises:
            OptionError: neither whole nor sharded.
        """
        given = self.state_dict_type if state_dict_type is None else state_dict_type
        name = str(getattr(given, "name", given or "SHARDED_STATE_DICT")).upper()
        if name not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            raise OptionError(
                f"state_dict_type={given!r}: give 'FULL_STATE_DICT' or 'SHARDED_STATE_DICT'"
            )
        self.state_dict_type = name

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Choose the dtype of computing and of exchanging gradients: "fp16", "bf16" or "fp32".

        Raises:
            OptionError: an unknown name; or ``buffer_autocast``, which `fully_shard` has not.
        """
        if buffer_autocast:
            raise OptionError("buffer_autocast=True: fully_shard leaves buffers as they are")
        given = self.mixed_precision_policy
        if given is not None and not isinstance(given, str) and not override:
            return
        name = str(getattr(mixed_precision, "value", mixed_precision))
        if name not in (*_DTYPES, "no"):
            raise OptionError(
                f"mixed_precision_policy={mixed_precision!r}: give 'fp16', 'bf16' or 'fp32'"
            )
        dtype = None if name == "no" else _DTYPES[name]
        self.mixed_precision_policy = _policy(param_dtype=dtype, reduce_dtype=dtype)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """See that the model has the classes that ``transformer_cls_names_to_wrap`` names.

        Which modules are units is found when the model is prepared, so nothing is set here.

        Raises:
            OptionError: the model has not such a class.
        """
        from anydevice.engines.wrapping import units_of

        units_of(model, self)

    def validate_mixed_precision_policy(self) -> None:
        """See that the precision is given in a form that `fully_shard` takes.

        Raises:
            OptionError: it is not; the message says what to give.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = self.mixed_precision_policy
        if given is not None and not isinstance(given, MixedPrecisionPolicy):
            raise OptionError(
                f"mixed_precision_policy={given!r}: give torch's MixedPrecisionPolicy, a dict of "
                "its arguments, or 'fp16', 'bf16' or 'fp32'"
            )

    @property
    def offload_policy(self) -> Any:
        """What ``cpu_offload`` is to torch."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        given = self.cpu_offload
        if isinstance(given, OffloadPolicy):
            return given
        if given is None or isinstance(given, bool):
            return CPUOffloadPolicy() if given else OffloadPolicy()
        if hasattr(given, "offload_params"):  # the class of torch's first FSDP
            return CPUOffloadPolicy() if given.offload_params else OffloadPolicy()
        raise OptionError(f"cpu_offload={given!r}: give True, False or an OffloadPolicy")


def _policy(**given: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if given.pop("buffer_dtype", None) is not None:
        raise OptionError("mixed_precision_policy: buffer_dtype is not there in fully_shard")
    for key, value in given.items():
        if isinstance(value, str):
            if value not in _DTYPES:
                raise OptionError(f"mixed_precision_policy: {key}={value!r} is no known dtype")
            given[key] = _DTYPES[value]
    try:
        return MixedPrecisionPolicy(**given)
    except TypeError as error:
        raise OptionError(f"mixed_precision_policy: {error}") from error
