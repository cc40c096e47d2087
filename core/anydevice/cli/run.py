"""``anydevice run``: the main job on one model, with what it did told on the way."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from anydevice import registry
from anydevice.cli.devices import describe_devices, devices_table
from anydevice.cli.text import size_text, table
from anydevice.errors import BudgetError, ModelError
from anydevice.pretrained import from_pretrained
from anydevice.tensors import iter_tensors

__all__ = ["import_transformers", "peak_rows", "register", "reset_peaks"]

_DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="load a transformers model over the devices and run it",
        description="Print the devices and the placement, load the checkpoint into place, run a "
        "forward pass, print the result, the time and the peak memory of each device.",
    )
    parser.add_argument("model", metavar="PATH_OR_REPO", help="a folder, or a Hub repo id")
    parser.add_argument("--text", default=_DEFAULT_TEXT, help="input of a text model")
    parser.add_argument(
        "--max-new-tokens", type=_count, default=16, metavar="N", help="of a model that generates"
    )
    parser.add_argument(
        "--max-memory",
        nargs="+",
        default=[],
        metavar="DEVICE=SIZE",
        help="budgets, such as 0=10GiB cpu=32GiB; by default what is free",
    )
    parser.add_argument(
        "--device-map",
        default="auto",
        help="auto, balanced, balanced_low_0, sequential, or a device",
    )
    parser.add_argument("--dtype", help="such as bfloat16; by default the checkpoint's own")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repo")
    parser.add_argument("--offload-folder", help="where weights are written that must be written")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    budgets = _budgets(args.max_memory)
    print(devices_table(describe_devices()), end="\n\n")
    reset_peaks()
    importing = import_transformers()
    start = time.perf_counter()
    model = from_pretrained(
        None,
        args.model,
        device_map=args.device_map,
        max_memory=budgets,
        dtype=args.dtype,
        revision=args.revision,
        offload_folder=args.offload_folder,
        progress=True,
    )
    loading = time.perf_counter() - start
    print(model.anydevice_placement.table(), end="\n\n")
    tokenizer = _tokenizer(args.model, args.revision)
    start = time.perf_counter()
    with torch.inference_mode():
        result = (
            _run_text(model, tokenizer, args.text, args.max_new_tokens)
            if tokenizer is not None
            else _run_synthetic(model)
        )
    running = time.perf_counter() - start
    print(result, end="\n\n")
    print(
        f"imported transformers in {importing:.2f} s, loaded in {loading:.2f} s, "
        f"ran in {running:.2f} s"
    )
    print(table(["DEVICE", "PEAK MEMORY"], peak_rows()))
    return 0


def import_transformers() -> float:
    """Import the bulk of transformers, which it puts off until a model class is named.

    It takes longer than loading a small model does, and would hide how long that takes.

    Returns:
        Seconds.
    """
    start = time.perf_counter()
    with contextlib.suppress(ImportError):  # `from_pretrained` says what to install
        from transformers import PreTrainedModel  # noqa: F401
    return time.perf_counter() - start


def _count(word: str) -> int:
    """Read a number from 1 up."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 1 up")
    return int(word)


def _budgets(words: list[str]) -> dict[int | str, int | str] | None:
    """Read ``["0=10GiB", "cpu=1GiB"]``."""
    budgets: dict[int | str, int | str] = {}
    for word in words:
        device, equals, size = word.rpartition("=")
        if not equals or not device:
            raise BudgetError(f"--max-memory {word!r}: write DEVICE=SIZE, such as 0=10GiB")
        budgets[int(device) if device.isdecimal() else device] = size
    return budgets or None


def _tokenizer(model: str, revision: str | None) -> Any | None:
    """The model's tokenizer; None when it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, revision=revision)
    except (OSError, ValueError, KeyError):
        return None


def _run_text(model: Any, tokenizer: Any, text: str, max_new_tokens: int) -> str:
    batch = tokenizer(text, return_tensors="pt")
    if model.can_generate():
        tokens = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
        return f"{text!r} -> {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}"
    return f"{text!r} -> {_describe(model(**batch))}"


def _run_synthetic(model: Any) -> str:
    """Run a model that has no tokenizer on inputs of the right shape."""
    inputs = getattr(model, "dummy_inputs", None)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        config = model.config
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        inputs = {name: torch.zeros(1, channels, height, width, dtype=model.dtype)}
    if not inputs:
        raise ModelError(
            f"{type(model).__name__} has no tokenizer beside it and takes {name!r}, for which no "
            "synthetic batch is known; load it with anydevice.from_pretrained and call it yourself"
        )
    return f"synthetic batch -> {_describe(model(**inputs))}"


def _describe(output: Any) -> str:
    first = next(iter_tensors(output), None)
    if first is None:
        return type(output).__name__
    values = first.flatten()[:5].tolist()
    numbers = ", ".join(f"{v:.4f}" for v in values)
    return f"{type(output).__name__} with {tuple(first.shape)} {first.dtype}: [{numbers}, ...]"


def reset_peaks() -> None:
    """Begin to count each device's peak memory."""
    for device in registry.available_devices():
        try:
            registry.get_backend(device).reset_peak_memory(device.index or 0)
        except NotImplementedError:  # this device keeps no count: `peak_rows` says so
            continue


def peak_rows() -> Iterator[tuple[str, str]]:
    """Each device with its peak memory, for a table."""
    for device in registry.available_devices():
        try:
            peak = registry.get_backend(device).peak_memory_allocated(device.index or 0)
        except NotImplementedError:
            yield str(device), "not told by the device"
        else:
            yield str(device), size_text(peak)
    yield f"process (pid {os.getpid()})", f"{size_text(_peak_rss())} resident"


def _peak_rss() -> int | None:
    """The process's peak resident memory in bytes; mapped weights count while they are in RAM."""
    import psutil

    info = psutil.Process().memory_info()
    peak = getattr(info, "peak_wset", None)
    if peak is not None:
        return int(peak)
    try:
        import resource
    except ImportError:
        return int(info.rss)
    import sys

    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
