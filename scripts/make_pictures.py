"""Write the pictures of the documentation: docs/images/overview.svg and overview.png.

usage: python scripts/make_pictures.py

The placement that the planner makes of a model of Llama's shape with 70 billion parameters, in
bfloat16, on a machine with two accelerators of 24 GiB and 64 GiB of RAM. No weights are needed.
"""

from __future__ import annotations

from pathlib import Path

from anydevice import Placement, infer_auto_device_map, init_empty_weights

FOLDER = Path(__file__).parents[1] / "docs" / "images"


def placement() -> Placement:
    """The plan that is drawn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    with init_empty_weights():
        model = LlamaForCausalLM(config).bfloat16()
    budgets = {0: "24GiB", 1: "24GiB", "cpu": "64GiB"}
    return infer_auto_device_map(model, budgets)


def main() -> None:
    """Write both."""
    plan = placement()
    for name in ("overview.svg", "overview.png"):
        print(plan.save_picture(FOLDER / name).relative_to(Path.cwd()))


if __name__ == "__main__":
    main()
