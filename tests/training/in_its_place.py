"""Once this is imported, ``import accelerate`` finds anydevice, for transformers too.

Ranks fork from a process that has imported it: see `test_trainer.py`.
"""

from __future__ import annotations

import importlib
import sys

PATHS = [
    *("accelerator", "big_modeling", "data_loader", "hooks", "launchers", "logging", "optimizer"),
    *("parallelism_config", "scheduler", "state", "tracking", "utils", "utils.dataclasses"),
    *(
        "utils.constants",
        "utils.deepspeed",
        "utils.fsdp_utils",
        "utils.imports",
        "utils.memory",
        "utils.modeling",
        "utils.offload",
        "utils.operations",
        "utils.other",
    ),
]

sys.modules["accelerate"] = importlib.import_module("anydevice")
for _path in PATHS:
    sys.modules[f"accelerate.{_path}"] = importlib.import_module(f"anydevice.{_path}")

# After that: what the ranks use, imported once for all of them.
importlib.import_module("transformers.trainer")
importlib.import_module("transformers.models.llama.modeling_llama")
