"""The report's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice_conformance.report.badge import badge
from anydevice_conformance.report.junit import junit
from anydevice_conformance.report.page import page

__all__ = ["write"]


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.json``, ``report.html``, ``junit.xml`` and ``badge.svg`` to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(report), encoding="utf-8")
    (folder / "junit.xml").write_text(junit(report), encoding="utf-8")
    (folder / "badge.svg").write_text(badge(report), encoding="utf-8")
