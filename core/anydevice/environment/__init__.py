"""The environment: its variables, versions, what is installed, and a process's processors.

Only `patch_environment`, `clear_environment` and `purge_accelerate_environment` change variables,
since that is what they are asked for; each puts back what was there.
"""

from __future__ import annotations

from anydevice.environment.affinity import override_numa_affinity, set_numa_affinity
from anydevice.environment.presence import availability, is_bf16_available, is_fp16_available
from anydevice.environment.variables import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from anydevice.environment.versions import check_os_kernel, compare_versions, is_torch_version

__all__ = [
    "availability",
    "check_os_kernel",
    "clear_environment",
    "compare_versions",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "is_bf16_available",
    "is_fp16_available",
    "is_torch_version",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]
