"""What each rank does in the tests of utilities."""

import random

import torch

from anydevice.processes import PartialState
from anydevice.randomness import set_seed, synchronize_rng_state, synchronize_rng_states
from anydevice.saving import load, save


def numbers(rank, size, folder):
    state = PartialState()
    device = state.device
    found = {}
    for name, options in {"same": {}, "own": {"device_specific": True}}.items():
        set_seed(3, **options)
        found[name] = (
            random.random(),
            torch.rand(1).item(),
            torch.rand(1, device=device).item(),
        )
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    kinds = ["torch", "generator"] + ([device.type] if device.type != "cpu" else [])
    synchronize_rng_states(kinds, generator)
    found["synchronized"] = (
        torch.rand(1).item(),
        torch.rand(1, generator=generator).item(),
        torch.rand(1, device=device).item() if device.type != "cpu" else 0,
    )
    synchronize_rng_state(generator=generator)
    save({"rank": torch.tensor([rank], device=device)}, f"{folder}/saved.pt")
    save({"w": torch.tensor([rank], device=device)}, f"{folder}/s.safetensors", False, True)
    state.wait_for_everyone()
    found["loaded"] = load(f"{folder}/saved.pt", map_location="cpu")["rank"].item()
    return found
