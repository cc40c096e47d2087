"""A transfer trace, as Perfetto reads it: Chrome's format, from real transfers."""

import itertools
import json
from collections import defaultdict

import jsonschema
import pytest

from anydevice import profile_transfers
from anydevice.errors import OptionError
from anydevice.transfer.chrome_trace import trace_events
from anydevice.transfer.profile import Span, TransferProfile

#: What the format's description asks of the events that are written here.
_NUMBER = {"type": "integer", "minimum": 0}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "cat": {"enum": ["link", "compute"]},
                            "ph": {"const": "X"},
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "pid": _NUMBER,
                            "tid": _NUMBER,
                            "args": {"type": "object"},
                        },
                        "additionalProperties": False,
                    },
                    {
                        "required": ["name", "ph", "pid", "tid", "args"],
                        "properties": {
                            "name": {"enum": ["process_name", "thread_name"]},
                            "ph": {"const": "M"},
                            "pid": _NUMBER,
                            "tid": _NUMBER,
                            "args": {
                                "required": ["name"],
                                "properties": {"name": {"type": "string"}},
                            },
                        },
                        "additionalProperties": False,
                    },
                ]
            },
        },
    },
}


def assert_rows_do_not_overlap(events):
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        # A thousandth of a microsecond, which is all that is written, may be lost in the sum.
        assert all(a[1] <= b[0] + 0.002 for a, b in itertools.pairwise(spans))


def test_a_trace_of_real_transfers(sim, make, x, tmp_path):
    sim.configure(devices=2, memory="64MiB", mode="thread")
    model = make(prefetch_depth=2, pin_budget=0)
    with profile_transfers() as profile:
        model(x)
    file = profile.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads(file.read_text())
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == "sim:0"
    for span in spans:  # each is in a row with a name
        row = names["thread_name", span["pid"], span["tid"]]
        assert row.startswith({"link": "copies", "compute": "compute"}[span["cat"]])
    assert sorted(e["name"] for e in spans) == sorted([str(i) for i in range(5)] * 2)
    assert sum(e["args"]["bytes"] for e in spans) == profile.bytes > 0
    copied = sum(e["dur"] for e in spans if e["cat"] == "link") / 1e6
    assert copied == pytest.approx(sum(group.seconds for group in profile.groups), rel=1e-3)
    assert_rows_do_not_overlap(events)


def test_spans_that_overlap_get_rows_of_their_own():
    times = [(0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (3.0, 5.0), (6.0, None)]
    profile = TransferProfile()
    spans = [
        Span(str(i), "foo:0", "compute", profile, begin=b, end=e) for i, (b, e) in enumerate(times)
    ]
    spans.append(Span("other", "foo:1", "link", profile, begin=0.0, end=1.0))
    events = trace_events(spans)
    jsonschema.validate({"traceEvents": events}, SCHEMA)
    found = {e["name"]: (e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert found == {"0": (1, 1), "1": (1, 2), "2": (1, 2), "3": (1, 1), "other": (2, 1)}
    assert_rows_do_not_overlap(events)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with profile_transfers() as profile:
        pass
    with pytest.raises(OptionError, match="nowhere"):
        profile.to_chrome_trace(tmp_path / "nowhere" / "trace.json")
