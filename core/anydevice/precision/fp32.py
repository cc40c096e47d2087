"""Results of low precision, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice.nested import map_tensors

__all__ = ["ConvertOutputsToFp32", "convert_outputs_to_fp32", "convert_to_fp32"]

_LOW: Final = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: Any) -> Any:
    """Convert each float16 and bfloat16 tensor in nested data to float32.

    Args:
        tensor: a tensor, or nested data of them; all else is left as it is.

    Example:
        >>> import torch
        >>> from anydevice.utils import convert_to_fp32
        >>> convert_to_fp32({"a": torch.ones(1, dtype=torch.float16), "n": 3})
        {'a': tensor([1.]), 'n': 3}
    """
    return map_tensors(lambda t: t.float() if t.dtype in _LOW else t, tensor)


class ConvertOutputsToFp32:
    """A function whose results are converted by `convert_to_fp32`. It can be pickled.

    Example:
        >>> import torch
        >>> from anydevice.utils import ConvertOutputsToFp32
        >>> forward = ConvertOutputsToFp32(lambda x: {"logits": x.half()})
        >>> forward(torch.ones(2))["logits"].dtype
        torch.float32
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Wrap a function, such as a model's forward, so that its results are float32.

    Example:
        >>> import torch
        >>> from anydevice.utils import convert_outputs_to_fp32
        >>> convert_outputs_to_fp32(torch.nn.Linear(2, 2, dtype=torch.bfloat16))(
        ...     torch.ones(1, 2, dtype=torch.bfloat16)
        ... ).dtype
        torch.float32
    """
    return ConvertOutputsToFp32(model_forward)
