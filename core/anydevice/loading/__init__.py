"""Loading checkpoints into models: matching, casting, streaming, several processes."""

from __future__ import annotations

from anydevice.loading.load import load_checkpoint_in_model
from anydevice.loading.report import LoadReport
from anydevice.loading.state_dicts import load_state_dict

__all__ = ["LoadReport", "load_checkpoint_in_model", "load_state_dict"]
