"""The reference's import path for quantization. No logic here."""

from anydevice.utils import load_and_quantize_model

__all__ = ["load_and_quantize_model"]
