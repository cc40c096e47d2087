"""A backend made for version 1.0 of the specification meets 1.1 without a change."""

from __future__ import annotations

import pytest

from anydevice import registry
from anydevice.backend import Capabilities, DeviceBackend
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.inprocess import run_checks
from anydevice_conformance.specification import load_specification

pytestmark = pytest.mark.usefixtures("warm_process")


class OldBackend(DeviceBackend):
    """Only members of 1.0."""

    device_type = "sim"
    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        collectives=True,
    )
    collective_backend = "simccl"


@pytest.fixture
def old(sim):
    (record,) = [r for r in registry.list_backends() if r.device_type == "sim"]
    before = record.backend
    record.backend = OldBackend()
    yield record
    record.backend = before


def test_what_1_1_adds_is_met_or_not_claimed(old):
    paragraphs = load_specification()
    added = {
        name for name, p in paragraphs.items() if p.group in ("PRO", "TRN") or p.since == "1.1"
    }
    checks = [c.name for c in load_catalogue().values() if c.paragraph in added]
    checks.append("test_DEV_002_members_well_formed")
    results = [e for e in run_checks(old, checks) if e["event"] == "result"]
    by_paragraph = {e["check"][5:12].replace("_", "-"): e["status"] for e in results}
    assert set(by_paragraph) == {*added, "DEV-002"}
    assert not {p: s for p, s in by_paragraph.items() if s not in ("passed", "not claimed")}
    for paragraph in added:
        bound = paragraphs[paragraph].capability is None
        assert by_paragraph[paragraph] == ("passed" if bound else "not claimed"), paragraph
