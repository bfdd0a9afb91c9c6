"""The page: its parts, its style and its few lines of script, in one file that needs no network."""

from __future__ import annotations

import html
from importlib import resources
from typing import TYPE_CHECKING

from autopar.report.html.breakdown import breakdown
from autopar.report.html.layers import layers
from autopar.report.html.markup import Markup, tag
from autopar.report.html.memory import memory
from autopar.report.html.mesh import mesh
from autopar.report.html.plans import alternatives, replicated, what_ifs
from autopar.report.html.summary import header, summary, tiles
from autopar.report.html.timeline import timeline

if TYPE_CHECKING:
    from autopar.plan import Plan

#: Parts of the page with the words that lead to them.
_PARTS = {
    "step": ("Step", breakdown),
    "timeline": ("Timeline", timeline),
    "memory": ("Memory", memory),
    "mesh": ("Mesh", mesh),
    "what-if": ("What if", what_ifs),
    "alternatives": ("Runner-ups", alternatives),
    "layers": ("Layers", layers),
    "repeated": ("Repeated work", replicated),
}
#: Nothing is loaded from anywhere: neither by the page nor by text of a model that would pass for markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_report(plan: Plan) -> str:
    """What was chosen, why, what it costs and what came second, as one HTML page. The same for the same plan."""
    files = resources.files(__package__)
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">'),
        tag("title", f"autopar: {plan}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    links = tag("nav", [tag("a", words, href=f"#{name}") for name, (words, _) in _PARTS.items()], aria_label="Parts")
    body = tag(
        "body",
        tag("a", "Skip to the summary", href="#summary", class_="skip"),
        header(plan),
        links,
        tag("main", tiles(plan), tag("section", summary(plan), id="summary", aria_label="Summary"),
            [part(plan) for _, part in _PARTS.values()]),
        tag("footer", "Predicted by autopar; nothing was run. docs/report.md says what everything means."),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Markup(script)),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def framed(page: str, title: str) -> str:
    """A page inside of another one: neither's style or script reaches the other's."""
    style = "width:100%;height:860px;border:1px solid #8884;border-radius:6px"
    return tag("iframe", title=title, sandbox="allow-scripts", style=style, srcdoc=page)
