"""The tracker of Weights & Biases, with the package itself and without its servers."""

from __future__ import annotations

import pytest
import torch

from anydevice import Accelerator


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
def test_an_offline_run_holds_what_was_logged(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers(
        "project-of-mine",
        config={"rate": 0.25},
        init_kwargs={"wandb": {"mode": "offline", "dir": str(tmp_path), "name": "run-of-mine"}},
    )
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert isinstance(run, wandb.Run)
    assert run.config["rate"] == 0.25
    accelerator.log({"loss-of-mine": torch.tensor(0.5)}, step=1)
    accelerator.log({"loss-of-mine": 0.25}, step=2)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"images-of-mine": [torch.zeros(4, 4, 3).numpy()]}, step=2)
    tracker.log_table("table-of-mine", columns=["a"], data=[[1]], step=2)
    accelerator.end_training()
    wandb.teardown()  # its own process has written all when it has ended
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kept = file.read_bytes()
    for word in ("run-of-mine", "project-of-mine", "loss-of-mine", "rate"):
        assert word.encode() in kept, word
    assert [*tmp_path.glob("wandb/offline-run-*/files/media/images/*.png")]
    assert [*tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
