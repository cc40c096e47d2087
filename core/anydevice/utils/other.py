"""The reference's import path for what fits nowhere else. No logic here."""

from anydevice.utils import (
    check_os_kernel,
    clean_state_dict_for_safetensors,
    clear_environment,
    convert_dict_to_env_variables,
    extract_model_from_parallel,
    get_mixed_precision_context_manager,
    get_module_children_bottom_up,
    has_compiled_regions,
    is_compiled_module,
    is_peft_model,
    load,
    model_has_dtensor,
    patch_environment,
    save,
    tqdm,
    wait_for_everyone,
)

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "clear_environment",
    "convert_dict_to_env_variables",
    "extract_model_from_parallel",
    "get_mixed_precision_context_manager",
    "get_module_children_bottom_up",
    "has_compiled_regions",
    "is_compiled_module",
    "is_peft_model",
    "load",
    "model_has_dtensor",
    "patch_environment",
    "save",
    "tqdm",
    "wait_for_everyone",
]
