"""The report that a person looks at: one HTML page that needs no network and no other file."""

from __future__ import annotations

from autopar.report.html.page import framed, html_report

__all__ = ["framed", "html_report"]
