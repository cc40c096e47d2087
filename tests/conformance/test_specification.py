"""The specification's pages, the packaged copy, and the suite's checks say the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from anydevice.backend import Capabilities
from anydevice_conformance._version import SPEC_VERSION
from anydevice_conformance.catalogue import SUITE_FOLDER, load_catalogue
from anydevice_conformance.specification import GROUPS, load_specification, parse_pages

PAGES = Path(__file__).parents[2] / "docs" / "spec"


def test_packaged_copy_is_the_pages():
    assert list(load_specification().values()) == parse_pages(PAGES)


def test_version_stands_on_the_page():
    assert f"Version {SPEC_VERSION}." in (PAGES / "README.md").read_text()


def test_ids_run_from_one():
    for group in GROUPS:
        numbers = [int(p[4:]) for p in load_specification() if p.startswith(group)]
        assert numbers == list(range(1, len(numbers) + 1)), group


def test_every_paragraph_has_statement_and_reason():
    for paragraph in load_specification().values():
        assert len(paragraph.statement) > 20, paragraph.id
        assert len(paragraph.reason) > 10, paragraph.id
        assert "*" not in paragraph.reason, paragraph.id


def test_capabilities_are_real():
    names = {field.name for field in dataclasses.fields(Capabilities)}
    used = {p.capability for p in load_specification().values() if p.capability}
    assert used == names


def test_every_check_says_what_was_found_and_how_to_fix_it():
    for check in load_catalogue().values():
        assert check.title.endswith("."), check.name
        assert check.found, check.name
        assert check.fix, check.name


def test_checks_need_what_their_paragraph_needs():
    """A paragraph of a capability has a check that needs it, and no other has."""
    for check in load_catalogue().values():
        source = (SUITE_FOLDER / f"{check.module}.py").read_text()
        head = re.search(r"^pytestmark = needs\(\"(\w+)\"\)", source, re.MULTILINE)
        above = re.search(rf"((?:@.*\n)*)def {check.name}\(", source)
        own = re.findall(r"@needs\(\"(\w+)\"\)", above[1])
        needed = {*([head[1]] if head else []), *own}
        capability = load_specification()[check.paragraph].capability
        assert (capability in needed) if capability else not needed, check.name


def test_a_paragraph_without_reason_is_refused(tmp_path):
    (tmp_path / "1.md").write_text("### DEV-001 Title\n\nA statement.\n")
    with pytest.raises(ValueError, match="DEV-001 has no"):
        parse_pages(tmp_path)


def test_an_id_twice_is_refused(tmp_path):
    (tmp_path / "1.md").write_text(
        "### DEV-001 A\n\nS.\n\n*Why:* R.\n\n### DEV-001 B\n\nS.\n\n*Why:* R.\n"
    )
    with pytest.raises(ValueError, match="DEV-001 comes twice"):
        parse_pages(tmp_path)
