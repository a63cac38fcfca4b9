"""Read a report's page as a browser would: its elements, what it loads, and its tables; and a stream for text."""

from __future__ import annotations

import html.parser
import io

VOID = frozenset({"meta", "input", "br", "link", "img"})


class Page(html.parser.HTMLParser):
    """A page whose tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: dict[str, list[dict[str, str]]] = {}
        """Title of the section -> rows: column -> cell; a cell's folded details are cells of their own."""
        self._title = self._column = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.elements.append((tag, known))
        if tag == "tr" and "tbody" in self._open:
            self.tables.setdefault(self._title, []).append({"state": known.get("class") or ""})
        if tag == "td":
            self._column = known["data-name"] or ""
            self.tables[self._title][-1][self._column] = ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        text = data.strip()
        if not text or "style" in self._open:
            return
        self.words.append(text)
        if self._open[-1] == "summary" and "table" not in self._open:
            self._title = text
        elif "td" in self._open:
            row = self.tables[self._title][-1]
            if self._open[-1] == "dt":
                self._column = text
                row[text] = ""
            else:
                row[self._column] += text


def read(text: str) -> Page:
    """The page, which is whole, runs no script and loads nothing."""
    page = Page(text)
    assert [tag for tag, _ in page.elements][:5] == ["html", "head", "meta", "meta", "meta"]
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    assert not any(name in ("src", "href", "srcset", "action") for _, known in page.elements for name in known)
    assert "http" not in text.replace("http-equiv", "")
    return page


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True
