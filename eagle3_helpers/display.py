"""What a person sees: tables and check lists that read the same in a notebook, a terminal and a report.

Every object has HTML (for the notebook and the report) and text (for a log). A verdict is a word, never a colour alone,
and no background is fixed, so that dark themes stay readable.
"""

import html

from eagle3_helpers.errors import CheckRefused


class Table:
    """Rows under headings, with an optional caption. Cells are plain values; they are escaped here."""

    def __init__(self, headings: list[str], rows: list[list], caption: str = ""):
        self.headings, self.rows, self.caption = headings, [[_text(cell) for cell in row] for row in rows], caption

    def __repr__(self) -> str:
        columns = list(zip(self.headings, *self.rows, strict=True))
        widths = [max(len(cell) for cell in column) for column in columns]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (self.headings, *self.rows)
        ]
        return "\n".join(
            [
                *([self.caption] if self.caption else []),
                lines[0],
                "  ".join("-" * width for width in widths),
                *lines[1:],
            ]
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in self.headings)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        caption = (
            f"<caption style='text-align:left;caption-side:top'><b>{html.escape(self.caption)}</b></caption>"
            if self.caption
            else ""
        )
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Checks:
    """A list of expected / observed / verdict, collected whole before anything stops."""

    def __init__(self, title: str):
        self.title, self.items = title, []

    def add(self, name: str, ok: bool, observed, expected="", remedy: str = "") -> "Checks":
        self.items.append(
            {"check": name, "expected": _text(expected), "observed": _text(observed), "ok": bool(ok), "remedy": remedy}
        )
        return self

    @property
    def ok(self) -> bool:
        return all(item["ok"] for item in self.items)

    def require(self, kind: type = CheckRefused) -> "Checks":
        """Raises `kind` naming every failed check with its value and remedy; returns itself when all hold."""
        failed = [item for item in self.items if not item["ok"]]
        if failed:
            wrong = "; ".join(
                f"{i['check']}: {i['observed']}" + (f" (expected {i['expected']})" if i["expected"] else "")
                for i in failed
            )
            raise kind(f"{self.title}: {wrong}.", " ".join(dict.fromkeys(i["remedy"] for i in failed if i["remedy"])))
        return self

    def _table(self) -> Table:
        rows = [
            ["OK" if i["ok"] else "STOP", i["check"], i["expected"], i["observed"], "" if i["ok"] else i["remedy"]]
            for i in self.items
        ]
        return Table(["verdict", "check", "expected", "observed", "what to do"], rows, self.title)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def joined(title: str, *parts: Checks) -> Checks:
    """All items of several lists under one title."""
    whole = Checks(title)
    for part in parts:
        whole.items += part.items
    return whole


def _text(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)


def bytes_text(count: float) -> str:
    """Decimal units, as disks are sold: 5.03 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def seconds_text(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
