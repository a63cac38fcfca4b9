"""Read a report's page as a browser would: its elements, what it loads, and its tables."""

from __future__ import annotations

import html.parser
import json
from typing import Any

VOID = frozenset({"meta", "input", "br", "link", "img"})


class Page(html.parser.HTMLParser):
    """A page whose tags are closed; `tables` are those of the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.size = len(text)
        self._open: list[str] = []
        self.loads: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._data = ""
        self._in_data = False
        self.feed(text)
        self.close()
        assert self._open == []
        self.data: dict[str, Any] = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.elements.append((tag, known))
        if tag != "a":
            self.loads += [
                f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")
            ]
        self._in_data = known.get("id") == "data"
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self._data += data
        elif not {"script", "style"} & set(self._open):
            self.words.append(data.strip())

    def skeleton(self) -> list[str]:
        """The elements that every report has, in order."""
        named = ("html", "head", "title", "style", "body", "header", "h1", "main", "script")
        return [tag for tag, _ in self.elements if tag in named]

    def rows(self, title: str) -> list[dict[str, Any]]:
        """The rows of a table: column -> cell."""
        (table,) = (each for each in self.data["tables"] if each["title"] == title)
        cells = {
            c["name"]: [c["texts"][i] for i in c["cells"]] if "texts" in c else c["cells"] for c in table["columns"]
        }
        states = [list(self.data["states"])[i] if i >= 0 else "" for i in table["states"]]
        return [{**{n: each[i] for n, each in cells.items()}, "state": states[i]} for i in range(len(states))]


SKELETON = ["html", "head", "title", "style", "body", "header", "h1", "main", "script", "script"]


def read(text: str) -> Page:
    """The page, which is whole, has the elements of every report and loads nothing."""
    page = Page(text)
    assert page.skeleton() == SKELETON
    assert page.loads == []
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    return page
