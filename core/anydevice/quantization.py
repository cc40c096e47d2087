"""What the reference does by bitsandbytes: refused, with what to use in its place."""

from __future__ import annotations

from typing import Any, NoReturn

from anydevice.errors import MissingDependencyError

__all__ = ["BnbQuantizationConfig", "installer", "load_and_quantize_model"]

_REMEDY = (
    "anydevice does not quantize by bitsandbytes, which works on some devices only. Quantize by "
    "torchao (pip install torchao; torchao.quantization.quantize_(model, config)), before or after "
    "load_checkpoint_and_dispatch, or load a checkpoint that is quantized already by "
    "transformers' from_pretrained with quantization_config"
)


class BnbQuantizationConfig:
    """Refused: there is no quantization by bitsandbytes here.

    Raises:
        MissingDependencyError: always; the message names the remedy.

    Example:
        >>> from anydevice.errors import AnyDeviceError
        >>> from anydevice.utils import BnbQuantizationConfig
        >>> try:
        ...     BnbQuantizationConfig(load_in_8bit=True)
        ... except AnyDeviceError as error:
        ...     print("transformers" in str(error))
        True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingDependencyError(f"BnbQuantizationConfig: {_REMEDY}.")


def load_and_quantize_model(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refused: there is no quantization by bitsandbytes here.

    Raises:
        MissingDependencyError: always; the message names the remedy.

    Example:
        >>> from torch import nn
        >>> from anydevice.errors import AnyDeviceError
        >>> from anydevice.utils import load_and_quantize_model
        >>> try:
        ...     load_and_quantize_model(nn.Linear(2, 2), None)
        ... except AnyDeviceError as error:
        ...     print("transformers" in str(error))
        True
    """
    raise MissingDependencyError(f"load_and_quantize_model: {_REMEDY}.")


def installer(name: str) -> Any:
    """The function that a name such as ``"install_foo"`` asks for: it refuses, with the remedy."""
    kind = name.removeprefix("install_")

    def refuse(upgrade: bool = False) -> NoReturn:
        raise MissingDependencyError(
            f"{name}: anydevice installs nothing. Install the vendor's packages for {kind!r} by "
            f"pip, torch_{kind} as its vendor says and an anydevice backend for it (`anydevice "
            "new-backend` writes one)."
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused: install the packages for {kind!r} by pip."
    return refuse
