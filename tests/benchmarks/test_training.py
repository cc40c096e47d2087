"""The benchmark of training runs, at a size at which its figures mean nothing."""

from __future__ import annotations

import json

from warm import run_python


def test_a_quick_run_measures(tmp_path):
    where = tmp_path / "figures.json"
    done = run_python("-m", "benchmarks.training", "--quick", "--alone", "--json", str(where))
    assert done.returncode == 0, done.stderr
    found = json.loads(where.read_text())
    assert set(found) == {"step, us over raw", "loader, us a batch over raw"}
    assert all("anydevice" in figures for figures in found.values())
