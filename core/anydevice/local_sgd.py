"""The reference's import path for `LocalSGD`. No logic here."""

from anydevice.training.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
