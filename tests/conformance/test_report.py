"""Verdicts, known failures, validation, and the report's faces."""

from __future__ import annotations

import copy
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import jsonschema
import pytest

from anydevice.text import format_bytes
from anydevice_conformance import report as reports
from anydevice_conformance.catalogue import load_catalogue, suite_digest
from anydevice_conformance.known import load_known
from anydevice_conformance.progress import summary
from anydevice_conformance.report import advice
from anydevice_conformance.report.badge import badge
from anydevice_conformance.report.junit import junit
from anydevice_conformance.report.page import page
from anydevice_conformance.report.validate import load_schema
from anydevice_conformance.statuses import Status, highest

CATALOGUE = load_catalogue()
CHECKS = list(CATALOGUE)
STAMPS = {
    "event": "stamps",
    "device_type": "foo",
    "anydevice": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.0",
    "platform": "Linux",
    "plugin": {"distribution": "anydevice-foo", "version": "1.0", "entry_point": "foo"},
    "driver": "535.1",
    "devices": [{"index": 0, "name": "Foo <1000>", "total": 2**30}],
    "capabilities": {"streams": {"claimed": True, "works": None}},
    "command": ["anydevice", "certify", "foo"],
    "quick": False,
    "assumed": [],
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 12.5,
    "suite_digest": suite_digest(),
}


def events(**changed):
    """A run in which all passed, but for the checks named."""
    return [STAMPS] + [result(name, changed.get(name, "passed")) for name in CHECKS]


def result(check, status, message="", case=""):
    return {
        "event": "result",
        "check": check,
        "case": case,
        "needs": [],
        "status": status,
        "message": message or ("" if status == "passed" else f"{status} because"),
        "seconds": 0.25,
    }


def test_statuses_only_move_up():
    order = ["not claimed", "no hardware", "skipped", "passed", "failed", "error"]
    assert [s.text for s in sorted(Status)] == order
    for one, other in itertools.combinations(Status, 2):
        assert highest([one, other]) is highest([other, one]) is other
    assert [Status.parse(s.text) for s in Status] == list(Status)


def test_all_passed_is_certified():
    report = reports.build(events())
    assert (report["verdict"], report["certified"], report["because"]) == ("certified", True, [])
    assert reports.validate(report) == []


@pytest.mark.parametrize("status", ["not claimed", "no hardware", "skipped"])
def test_a_check_that_did_not_run_is_no_failure(status):
    report = reports.build(events(test_MOV_017_between_devices=status))
    assert report["certified"]
    found = {r["check"]: r["status"] for r in report["results"]}
    assert found["test_MOV_017_between_devices"] == status


def test_one_failure_fails():
    report = reports.build(events(test_MOV_007_strides="failed"))
    assert report["verdict"] == "failed"
    assert report["because"] == ["test_MOV_007_strides failed"]
    assert reports.validate(report) == []


def test_an_error_is_more_than_a_failure():
    changed = {"test_MOV_007_strides": "failed", "test_MOV_008_view_moves_alone": "error"}
    assert reports.build(events(**changed))["verdict"] == "error"


def test_no_hardware_is_never_a_pass():
    none = [{**STAMPS, "devices": []}] + [result(name, "no hardware") for name in CHECKS]
    report = reports.build(none)
    assert report["verdict"] == "no hardware"
    assert reports.decide(report).exit_code == 1
    assert reports.validate(report) == []


def test_a_group_in_which_nothing_passed_forbids_the_certificate():
    skipped = {name: "not claimed" for name in CHECKS if "_MEM_" in name}
    report = reports.build(events(**skipped))
    assert report["verdict"] == "passed, not certified"
    assert report["because"] == ["nothing passed in Memory"]


def test_of_many_runs_the_worst_stands():
    more = [
        result("test_MOV_007_strides", "no hardware", case="a"),
        result("test_MOV_007_strides", "failed", "broke", case="b"),
    ]
    report = reports.build(events() + more)
    (found,) = [r for r in report["results"] if r["check"] == "test_MOV_007_strides"]
    assert (found["status"], found["message"], len(found["cases"])) == ("failed", "broke", 3)


@pytest.mark.parametrize(
    ("event", "word"),
    [
        ({"event": "deselected", "checks": ["test_MOV_007_strides"]}, "was deselected"),
        (
            {"event": "override", "what": "fixture 'subject' comes from conftest"},
            "override: fixture",
        ),
        ({**STAMPS, "quick": True}, "--quick"),
        ({**STAMPS, "suite_digest": "0" * 16}, "not the suite of this version"),
        ({**STAMPS, "assumed": ["streams"]}, "assumed"),
    ],
)
def test_tampering_shows_and_forbids_the_certificate(event, word):
    report = reports.build([*events(), event])
    assert report["verdict"] == "passed, not certified"
    assert word in " ".join(report["because"])


def test_a_missing_check_forbids_the_certificate_and_is_unsound():
    report = reports.build([e for e in events() if e.get("check") != "test_MOV_007_strides"])
    assert not report["certified"]
    assert "test_MOV_007_strides is missing" in reports.validate(report)


# ---------------------------------------------------------------------- known failures

ENTRY = {"reason": "driver bug", "link": "https://foo.example/7"}


@pytest.mark.parametrize("name", ["test_MOV_007_strides", "MOV-007"])
def test_a_known_failure_is_excused_but_not_certified(name):
    report = reports.build(events(test_MOV_007_strides="failed"), {name: ENTRY})
    assert (report["verdict"], report["certified"]) == ("passed with known failures", False)
    assert reports.decide(report).exit_code == 0
    assert reports.validate(report) == []


@pytest.mark.parametrize("name", ["test_MOV_007_strides", "MOV-007"])
def test_a_known_failure_that_passes_is_an_error(name):
    report = reports.build(events(), {name: ENTRY})
    assert report["verdict"] == "error"
    assert "passes now" in " ".join(report["because"])
    assert reports.validate(report) == []


def test_a_stale_known_failure_is_to_be_removed_not_fixed(tmp_path):
    """The check itself passes: what it says of a faulty backend would lead astray."""
    report = reports.build(events(), {"MOV-007": ENTRY})
    own = CATALOGUE["test_MOV_007_strides"]
    html = page(report)
    for text in (summary(report, tmp_path), html):
        assert "remove the entry from the file of known failures" in text
        assert own.fix.split(";")[-1] not in text
    assert own.found not in html
    assert "known failure &#x27;MOV-007&#x27; passes now" in html
    assert not [reason for reason in report["because"] if "the suite broke" in reason]


def test_a_known_failure_that_names_no_check_is_an_error():
    report = reports.build(events(), {"MOV-999": ENTRY})
    assert report["verdict"] == "error"
    assert "names no check" in " ".join(report["because"])


def test_other_failures_are_not_excused():
    changed = {"test_MOV_007_strides": "failed", "test_MOV_008_view_moves_alone": "failed"}
    assert reports.build(events(**changed), {"MOV-007": ENTRY})["verdict"] == "failed"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "Expecting"),
        ("[]", "not an object"),
        ('{"MOV-007": {"reason": "x"}}', "needs a reason and a link"),
        ('{"MOV-007": {"reason": "", "link": "https://x"}}', "needs a reason and a link"),
        ('{"MOV-007": "x"}', "needs a reason and a link"),
    ],
)
def test_a_bad_file_of_known_failures_is_named(tmp_path, text, fault):
    file = tmp_path / "known.json"
    file.write_text(text)
    known, complaints = load_known(file)
    assert known == {}
    assert fault in complaints[0]
    assert reports.build(events(), known, complaints)["verdict"] == "error"


def test_a_good_file_of_known_failures(tmp_path):
    file = tmp_path / "known.json"
    file.write_text(json.dumps({"MOV-007": ENTRY}))
    assert load_known(file) == ({"MOV-007": ENTRY}, [])
    assert load_known(None) == ({}, [])


# ---------------------------------------------------------------------- validation


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(load_schema())


def forge(change):
    report = copy.deepcopy(reports.build(events(test_MOV_007_strides="failed")))
    change(report)
    return reports.validate(report)


def test_a_forged_verdict_is_found():
    faults = forge(lambda r: r.update(verdict="certified", certified=True, because=[]))
    assert any("verdict" in fault for fault in faults)
    assert any("certified" in fault for fault in faults)


def test_a_forged_status_is_found():
    def change(report):
        for found in report["results"]:
            if found["status"] == "failed":
                found["status"] = "passed"
        report.update(verdict="certified", certified=True, because=[])

    assert any("its cases make it 'failed'" in fault for fault in forge(change))


def test_an_invented_check_is_found():
    def change(report):
        report["results"].append({**report["results"][0], "check": "test_MOV_999_new"})

    assert any("no check of this suite" in fault for fault in forge(change))


def test_an_invented_excuse_is_found():
    def change(report):
        for found in report["results"]:
            if found["status"] == "failed":
                found["known"] = ENTRY

    assert any("excused by no known failure" in fault for fault in forge(change))


@pytest.mark.parametrize("key", ["verdict", "stamps", "results", "spec"])
def test_a_missing_part_is_found(key):
    assert any(key in fault for fault in forge(lambda report: report.pop(key)))


def test_another_version_is_found():
    assert any("spec 9.9" in fault for fault in forge(lambda report: report.update(spec="9.9")))


@pytest.mark.parametrize("report", [None, [], {}, "x", 3])
def test_what_is_no_report_is_refused(report):
    assert reports.validate(report)


# ---------------------------------------------------------------------- faces


@pytest.fixture
def mixed():
    message = "strides <b> & \x00 lost"
    changed = [
        result("test_MOV_007_strides", "failed", message, case="0-transposed"),
        result("test_MOV_020_above_4_gib", "skipped", "needs 4 GiB"),
    ]
    flag = {"event": "flag", "what": "streams", "message": "streams work: claim them"}
    return reports.build([*events(), *changed, flag])


def test_junit_counts_and_is_xml(mixed):
    root = ElementTree.fromstring(junit(mixed))
    suites = {suite.get("name"): suite for suite in root}
    movement = suites["Movement"]
    assert movement.get("failures") == "1"
    assert int(movement.get("tests")) == len([n for n in CHECKS if "_MOV_" in n])
    (failure,) = movement.iter("failure")
    assert "strides <b> &" in failure.get("message")


def test_page_stands_alone_and_escapes(mixed):
    html = page(mixed)
    assert "&lt;b&gt;" in html
    assert "strides <b>" not in html
    assert "Foo &lt;1000&gt;" in html
    assert not re.search(r"<(?:script|link|img|iframe)\b", html)
    assert "https://" not in html.replace("https://foo.example", "")
    for words in (
        "MOV-007",
        "What to fix",
        "Works, but is not claimed",
        "device 0, transposed",
        "535.1",
    ):
        assert words in html


def test_page_of_every_verdict():
    for report in (
        reports.build(events()),
        reports.build([{**STAMPS, "devices": []}, *[result(n, "no hardware") for n in CHECKS]]),
        reports.build(events(test_MOV_007_strides="failed"), {"MOV-007": ENTRY}),
        reports.build(events(test_MOV_007_strides="error")),
        reports.build([*events(), {**STAMPS, "quick": True}]),
    ):
        assert report["verdict"] in page(report)


def test_badge_is_svg(mixed):
    root = ElementTree.fromstring(badge(mixed))
    assert root.tag.endswith("svg")
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts == ["anydevice spec 1.1 · foo", "failed on 1 device"]


def test_write_writes_all_four(mixed, tmp_path):
    reports.write(mixed, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "badge.svg",
        "junit.xml",
        "report.html",
        "report.json",
    ]
    assert reports.validate(json.loads((tmp_path / "report.json").read_text())) == []


# ---------------------------------------------------------------------- what a reader looks for


def test_a_simulator_is_never_certified():
    report = reports.build([{**STAMPS, "simulated": True}, *events()[1:]])
    assert (report["verdict"], report["certified"]) == ("passed on a simulator", False)
    assert reports.validate(report) == []
    assert reports.decide(report).exit_code == 0
    assert "on 1 simulated device" in badge(report)
    assert "says nothing of any hardware" in page(report)


def test_the_number_of_devices_stands_in_verdict_and_badge(tmp_path):
    two = [{"index": i, "name": "Foo", "total": 64 << 20} for i in range(2)]
    report = reports.build([{**STAMPS, "devices": two}, *events()[1:]])
    for text in (page(report), badge(report), summary(report, tmp_path)):
        assert "on 2 devices" in text
    assert format_bytes(64 << 20) in page(report)


def test_causes_stand_before_symptoms():
    changed = {"test_MOV_007_strides": "failed", "test_INF_001_auto_map": "failed"}
    changed["test_DTY_007_result_dtypes"] = "failed"
    html = page(reports.build(events(**changed))).partition("What to fix")[2]
    places = [html.index(f'id="{name}"') for name in sorted(changed, key=CHECKS.index)]
    assert places == sorted(places)


def test_advice_leads_only_to_what_failed_too():
    alone = reports.build(events(test_INF_001_auto_map="failed"))
    both = reports.build(
        events(test_INF_001_auto_map="failed", test_MOV_017_between_devices="failed")
    )
    for report, there in ((alone, False), (both, True)):
        (result,) = [r for r in report["results"] if r["check"] == "test_INF_001_auto_map"]
        text = advice.fix(result, advice.bad_paragraphs(report))
        assert ("MOV-017" in text) == there
        assert "MEM-009" not in text
        assert ("report it to anydevice" in text) != there


QUICK = {"event": "stamps", "quick": True, "seed": 3}


def test_a_failure_shows_its_first_line_and_its_counterexample():
    message = "values changed\nassert a == b\ncounterexample: <move of float32 (3,)>\nseed 0"
    found = result("test_MOV_025_every_move", "failed", message, case="1")
    html = page(reports.build([*events(), found]))
    assert "<pre>values changed</pre>" in html
    assert "&lt;move of float32 (3,)&gt;</code>" in html
    assert "device 1" in html
    assert "-k test_MOV_025_every_move" in html
    assert "--anydevice-quick" not in html
    assert "--anydevice-quick" in page(reports.build([*events(), found, QUICK]))
    assert 'href="#MOV-025"' in html
    assert 'id="MOV-025"' in html


def test_what_is_not_claimed_stands_at_the_top():
    missing = {n: "not claimed" for n in CHECKS if "_STR_" in n}
    html = page(reports.build(events(**missing)))
    assert html.index("What it claims") < html.index("All checks")
    assert "not claimed because" in html.partition("All checks")[0]


def test_each_anchor_is_one():
    html = page(reports.build(events(test_MOV_007_strides="failed")))
    anchors = re.findall(r' id="([^"]+)"', html)
    assert len(anchors) == len(set(anchors))
    assert set(CHECKS) <= set(anchors)
    links = re.findall(r'href="#([^"]+)"', html)
    assert set(links) <= set(anchors)
