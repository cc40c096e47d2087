"""The report of a run: its data, its verdict, and its faces (JSON, JUnit XML, a page, a badge)."""

from __future__ import annotations

from anydevice_conformance.report.build import build
from anydevice_conformance.report.validate import validate
from anydevice_conformance.report.verdict import Verdict, decide
from anydevice_conformance.report.write import write

__all__ = ["Verdict", "build", "decide", "validate", "write"]
