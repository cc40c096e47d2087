"""Mixed precision: what the backend can do, and results in float32. No module is patched."""

from __future__ import annotations

from anydevice.precision.fp32 import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32
from anydevice.precision.scaling import get_grad_scaler

__all__ = [
    "ConvertOutputsToFp32",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "get_grad_scaler",
]
