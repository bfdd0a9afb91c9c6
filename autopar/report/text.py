"""The plan report for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan import Plan


def text_report(plan: Plan) -> str:
    """TODO"""
    return str(plan)
