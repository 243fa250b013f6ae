"""What a test reads from a `report.html`."""

import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The text, the elements and the scripts of a page; unbalanced tags are an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self._texts: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes.get("id") or ""))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "script" in tags:
            name = self._open[-1][1]
            self.scripts[name] = self.scripts.get(name, "") + data
        elif "style" not in tags:
            self._texts.append(data)
            if ("td" in tags or "th" in tags) and self.rows[-1]:
                self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        """The visible text, with single spaces."""
        return " ".join(" ".join(self._texts).split())

    @property
    def figures(self) -> dict[str, Any]:
        """The figures by the id of their element."""
        return json.loads(self.scripts["figures"])

    @property
    def library(self) -> str:
        """The embedded plotly.js."""
        return zlib.decompress(base64.b64decode(self.scripts["plotly"])).decode()

    def ids(self) -> set[str]:
        """The ids of all elements."""
        return {str(attributes["id"]) for _, attributes in self.elements if "id" in attributes}

    def addresses(self) -> list[str]:
        """What the elements load or link to."""
        names = ("src", "href", "srcset", "action", "data")
        return [str(a[name]) for _, a in self.elements for name in names if name in a]
