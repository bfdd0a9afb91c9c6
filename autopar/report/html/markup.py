"""Markup, written so that whatever is not markup is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Elements that have no content.
_VOID = frozenset({"meta", "link", "input", "br", "col"})


class Markup(str):
    """Text that is markup already, and is not escaped."""

    __slots__ = ()


def joined(content: object) -> Markup:
    """Content one after the other: text escaped, markup as it is, of other iterables every item."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int | float):
        return Markup(html.escape(str(content)))
    if not isinstance(content, Iterable):
        raise TypeError(f"no content: {content!r}")
    return Markup("".join(map(joined, content)))


def tag(name: str, /, *content: object, **attributes: str | float | bool | None) -> Markup:
    """One element. Names of attributes end with an underscore where Python has the word, and others stand for dashes:
    ``class_``, ``aria_label``. True is an attribute without a value, None and False are none; numbers are short."""
    found = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Markup(f"<{name}{found}>" if name in _VOID else f"<{name}{found}>{joined(content)}</{name}>")


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(value if isinstance(value, str) else number(value))}"'


def number(value: float) -> str:
    """A coordinate or a percentage: at most two digits after the point, none that say nothing."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def section(name: str, title: str, lead: object, *content: object) -> Markup:
    """A part of the page that the navigation leads to; ``lead`` says what one sees."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        tag("p", lead, class_="lead") if lead else None,
        *content,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def grid(
    header: Sequence[tuple[str, str]], rows: Iterable[Markup], caption: str, sortable: bool = False, **more: str
) -> Markup:
    """A table with the columns ``header``, each a title and a class ("n" holds numbers), and the ``rows``, elements
    ``tr`` or ``tbody``. With ``sortable`` its titles are buttons that the page's script listens to."""
    titles = [
        tag(
            "th",
            tag("button", title, type="button") if sortable and title else title,
            scope="col",
            class_=kind or None,
            aria_sort="none" if sortable and title else None,
        )
        for title, kind in header
    ]
    found = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", tag("tr", titles)),
        rows,
        class_="sortable" if sortable else None,
        **more,
    )
    return tag("div", found, class_="scroll", tabindex="0", role="region", aria_label=caption)


def cell(text: object, kind: str = "", value: float | str | None = None, **more: str) -> Markup:
    """A cell; ``value`` is what it is sorted by, where that is not its text."""
    shown = None if value is None else (value if isinstance(value, str) else repr(float(value)))
    return tag("td", text, class_=kind or None, data_value=shown, **more)


def swatch(kind: str) -> Markup:
    """The colour of a kind, beside its name."""
    return tag("i", class_=f"swatch k-{kind}", aria_hidden="true")


def legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """Colours by their names: (kind, what it stands for)."""
    return tag("ul", [tag("li", swatch(kind), text) for kind, text in kinds], class_="legend")
