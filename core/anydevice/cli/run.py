"""``anydevice run``: the main job on one model, with a report of each step."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import re
import time
from pathlib import Path
from typing import Any, Final

import torch

from anydevice import registry
from anydevice.cli.devices import describe_devices, devices_table
from anydevice.cli.network import cache_only_when_unreachable
from anydevice.cli.peaks import peak_rows, reset_peaks
from anydevice.cli.text import shows_progress, table
from anydevice.errors import (
    AnyDeviceError,
    BudgetError,
    DeviceMapError,
    DoesNotFitError,
    ModelError,
)
from anydevice.nested import iter_tensors
from anydevice.pretrained import from_pretrained
from anydevice.pretrained.inputs import synthetic_batch
from anydevice.text import read_bytes

__all__ = ["import_transformers", "prepare", "register"]

_BUDGET: Final = re.compile(r"[\w:]+=[\w.]+")

_DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "run",
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
        action="append",
        default=[],
        metavar="DEVICE=SIZE",
        help="budgets, such as 0=10GiB cpu=32GiB; by default what is free",
    )
    parser.add_argument(
        "--device-map",
        default="auto",
        help="auto, balanced, balanced_low_0, sequential, a device, or a JSON file of module names "
        "to devices",
    )
    parser.add_argument("--dtype", help="such as bfloat16; by default the checkpoint's own")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repo")
    parser.add_argument("--variant", help="such as fp16, for files named so")
    parser.add_argument("--token", help="for a private Hub repo")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the repo carries"
    )
    parser.add_argument("--offload-folder", help="where weights are written that must be written")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)


def prepare(words: list[str]) -> list[str]:
    """Let ``--max-memory 0=1GiB cpu=2GiB`` take every budget that follows, and nothing else."""
    prepared: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--max-memory" and rest:
            prepared.append(f"--max-memory={rest.pop(0)}")
            while rest and _BUDGET.fullmatch(rest[0]):
                prepared.append(f"--max-memory={rest.pop(0)}")
        else:
            prepared.append(word)
    return prepared


def _run(args: argparse.Namespace) -> int:
    if not shows_progress():  # huggingface_hub's own bars would fill a log file
        import huggingface_hub.utils

        silence: Any = huggingface_hub.utils
        silence.disable_progress_bars()
    with cache_only_when_unreachable(args.model):
        return _load_and_run(args)


def _load_and_run(args: argparse.Namespace) -> int:
    budgets = _budgets(args.max_memory)
    device_map = _device_map(args.device_map)
    report: dict[str, Any] = {"devices": describe_devices()}
    if not args.json:
        print(devices_table(report["devices"]), end="\n\n")
    reset_peaks()
    importing = import_transformers()
    start = time.perf_counter()
    model = from_pretrained(
        None,
        args.model,
        device_map=device_map,
        max_memory=budgets,
        dtype=args.dtype,
        revision=args.revision,
        variant=args.variant,
        token=args.token,
        trust_remote_code=args.trust_remote_code,
        offload_folder=args.offload_folder,
        progress=shows_progress(),
    )
    loading = time.perf_counter() - start
    placement = model.anydevice_placement
    if not args.json:
        print(placement.table(), end="\n\n")
    tokenizer, missing = _tokenizer(args)
    start = time.perf_counter()
    result = _forward(model, tokenizer, args)
    running = time.perf_counter() - start
    if missing:
        result += f"\n({missing})"
    seconds = {"importing": importing, "loading": loading, "running": running}
    if args.json:
        report |= {"device_map": dict(placement), "result": result, "seconds": seconds}
        report["peaks"] = dict(peak_rows())
        print(json.dumps(report, indent=2, default=str))
        return 0
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
    before = logging.root.manager.disable
    # It imports every quantizer that is installed; what those log of kernels for other hardware
    # says nothing of this model.
    logging.disable(logging.WARNING)
    try:
        with contextlib.suppress(ImportError):  # `from_pretrained` says what to install
            from transformers import PreTrainedModel  # noqa: F401
    finally:
        logging.disable(before)
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
        read_bytes(size, f"--max-memory {word!r}")
        budgets[int(device) if device.isdecimal() else device] = size
    return budgets or None


def _device_map(given: str) -> Any:
    """A strategy or device as it is, or the mapping in a JSON file."""
    path = Path(given)
    if path.suffix != ".json" and not path.is_file():
        return given
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeviceMapError(f"--device-map {given}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DeviceMapError(
            f"--device-map {given}: a JSON object is needed, of module names to devices, such as "
            '{"model.layers.0": 0, "": "cpu"}'
        )
    return found


def _tokenizer(args: argparse.Namespace) -> tuple[Any | None, str]:
    """The model's tokenizer; or None, and why there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            args.model,
            revision=args.revision,
            token=args.token,
            trust_remote_code=args.trust_remote_code,
        )
    except Exception as error:  # noqa: BLE001 - a tokenizer fails in many ways; the model runs without
        first = str(error).strip().partition("\n")[0]
        return None, f"no tokenizer: {type(error).__name__}: {first:.200}"
    return tokenizer, ""


def _forward(model: Any, tokenizer: Any | None, args: argparse.Namespace) -> str:
    """Run the model once and describe the result."""
    reads_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    try:
        with torch.inference_mode():
            if tokenizer is not None and reads_text:
                return _run_text(model, tokenizer, args.text, args.max_new_tokens)
            batch = synthetic_batch(model)
            return f"synthetic batch -> {_describe(model(**batch))}"
    except AnyDeviceError:
        raise
    except Exception as error:
        if any(r.backend and r.backend.is_out_of_memory(error) for r in registry.list_backends()):
            raise DoesNotFitError(
                f"{type(model).__name__} was loaded, and a device ran out of memory when it ran "
                f"({error!s:.200}). Leave more room for activations: lower --max-memory"
            ) from error
        raise ModelError(
            f"{type(model).__name__} was loaded and placed, and could not be run on a synthetic "
            f"batch: {type(error).__name__}: {error!s:.500}. Load it with "
            "anydevice.from_pretrained and call it yourself"
        ) from error


def _run_text(model: Any, tokenizer: Any, text: str, max_new_tokens: int) -> str:
    batch = dict(tokenizer(text, return_tensors="pt"))
    if not model.can_generate():
        takes = inspect.signature(model.forward).parameters
        whole = {**synthetic_batch(model), **batch}
        return f"{text!r} -> {_describe(model(**{k: v for k, v in whole.items() if k in takes}))}"
    tokens = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    return f"{text!r} -> {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}"


def _describe(output: Any) -> str:
    first = next(iter_tensors(output), None)
    if first is None:
        return type(output).__name__
    values = first.flatten()[:5].tolist()
    numbers = ", ".join(f"{v:.4f}" for v in values)
    return f"{type(output).__name__} with {tuple(first.shape)} {first.dtype}: [{numbers}, ...]"
