"""The report as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def page(report: Mapping[str, Any]) -> str:
    """One self-contained HTML page."""
    return f"<p>{report['verdict']}</p>"
