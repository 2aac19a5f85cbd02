"""Parse a report as a browser does: figures with their sources, marks and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta"}


@dataclass
class Figure:
    """The content of a figure: the values of its marks, its cells and its text."""

    source: str
    marks: list[tuple[float, float | None]] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    text: str = ""


class ReportPage(HTMLParser):
    """Parses a page. Every tag must be closed in order, and nothing may be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[Figure] = []
        self.sections: dict[str, str] = {}
        self.links: list[str] = []
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def by(self, source: str) -> list[Figure]:
        """Return the figures that name a source."""
        return [figure for figure in self.figures if figure.source == source]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert not {name for name in given if name.startswith("on") or name == "src"}
        if "href" in given:
            assert given["href"].startswith("#")
            self.links.append(given["href"][1:])
        if tag == "figure":
            self.figures.append(Figure(given["data-source"]))
        if tag == "section":
            self.sections[given["id"]] = ""
        if "data-x" in given:
            y = float(given["data-y"]) if "data-y" in given else None
            self.figures[-1].marks.append((float(given["data-x"]), y))
        if "data-floor" in given:
            self.figures[-1].floors.append(float(given["data-floor"]))
        if tag == "td":
            self.figures[-1].cells.append("")
        if tag not in _VOID:
            self._open.append((tag, given))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "figure" in tags:
            self.figures[-1].text += data
            if "td" in tags:
                self.figures[-1].cells[-1] += data
        if "section" in tags:
            self.sections[list(self.sections)[-1]] += data
        if "style" in tags:
            assert "url(" not in data and "@import" not in data
