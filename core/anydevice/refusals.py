"""Names of the reference that have no meaning here: each says what to use instead."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from anydevice.errors import OptionError

__all__ = ["refused"]

_FP8: Final = (
    "convert the model with torchao (torchao.float8.convert_to_float8_training) and give "
    "mixed_precision='bf16'"
)
_CONTEXT: Final = "sequences are not divided: use tp_size or dp_shard_size of ParallelismConfig"
_WRAPPER: Final = (
    "accelerator.prepare gives DeepSpeed's own engine: call accelerator.backward(loss) and "
    "optimizer.step()"
)
_INSTEAD: Final = {
    **dict.fromkeys(
        ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"), _FP8
    ),
    **dict.fromkeys(
        ("apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model_to_fp8_ao"), _FP8
    ),
    **dict.fromkeys(("DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper"), _WRAPPER),
    "DeepSpeedSequenceParallelConfig": _CONTEXT,
    "TorchContextParallelConfig": _CONTEXT,
    "GatheredParameters": "use deepspeed.zero.GatheredParameters",
    "PrepareForLaunch": "use notebook_launcher or debug_launcher",
    "get_active_deepspeed_plugin": "use accelerator.deepspeed_plugin: an Accelerator has one",
    "map_pytorch_optim_to_deepspeed": "make DeepSpeed's optimizer, and prepare that",
    "prepare_sagemager_args_inputs": "use torchrun in the job: SageMaker starts it",
}


def refused(name: str) -> Any:
    """What a refused name stands for: a class that cannot be made; None for other names.

    Example:
        >>> from anydevice.utils import FP8RecipeKwargs
        >>> FP8RecipeKwargs()
        Traceback (most recent call last):
        ...
        anydevice.errors.OptionError: FP8RecipeKwargs is not there: convert the model with ...
    """
    instead = _INSTEAD.get(name)
    if instead is None:
        return None

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(f"{name} is not there: {instead}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Refused: {instead}."})
