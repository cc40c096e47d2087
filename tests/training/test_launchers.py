"""Launchers start processes anew, and never fork; one that dies ends the others."""

from __future__ import annotations

import pytest
from training import launched

from anydevice.errors import OptionError
from anydevice.launchers import debug_launcher, notebook_launcher
from anydevice.processes import PartialState


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_debug_launcher(tmp_path, monkeypatch):
    """Its processes work together; one that dies ends the others; it returns when all return."""
    monkeypatch.delattr("os.fork", raising=False)  # whoever forks fails
    with pytest.raises(Exception, match="SIGKILL"):
        debug_launcher(launched.write_rank_and_die, (str(tmp_path),), num_processes=2)
    found = sorted(p.read_text() for p in tmp_path.iterdir())
    assert found == ["2 3.0 no None"] * 2 or found == ["2 3.0 no spawn"] * 2, found
    debug_launcher(launched.write_rank, (str(tmp_path),), num_processes=1)
    assert (tmp_path / "rank-0").read_text().startswith("1 1.0 no")
    with pytest.raises(OptionError, match="num_processes=0"):
        debug_launcher(launched.write_rank, num_processes=0)


def test_notebook_launcher(tmp_path, monkeypatch):
    notebook_launcher(
        launched.write_rank, (str(tmp_path),), num_processes=2, mixed_precision="bf16", use_port="0"
    )
    assert sorted(p.read_text()[:10] for p in tmp_path.iterdir()) == ["2 3.0 bf16"] * 2
    notebook_launcher(launched.write_rank, (str(tmp_path),), num_processes=1)
    assert (tmp_path / "rank-0").read_text().startswith("1 1.0 no")
    with pytest.raises(OptionError, match="was made in this process"):
        notebook_launcher(launched.write_rank, (str(tmp_path),), num_processes=2)
    PartialState._reset_state()
    with pytest.raises(OptionError, match="num_processes=0"):
        notebook_launcher(launched.write_rank, num_processes=0)
