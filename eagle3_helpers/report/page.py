"""The report of a run: one HTML file that says what was done, with its evidence inside it.

It is made from the files of the run folder (and the sample table that the folder points to), so it can be made at any
moment. A part whose file is absent says "not done yet"; a part whose file is damaged says so and names it: a report never
fails over the run it describes. Nothing is loaded from anywhere and no script runs; the page forbids both to itself.
Every text out of a file is escaped. Equal files give an equal report, byte for byte: no time of its own is in it.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2

from eagle3_helpers.durable import write_bytes
from eagle3_helpers.report.evidence import Evidence
from eagle3_helpers.report.sections import SECTIONS, Absent, headline
from eagle3_helpers.runs import Run


def build_report(run: Run) -> Path:
    """Writes `report.html` into the run folder and returns its path."""
    evidence = Evidence(run)
    sections = [_section(title, builder, evidence) for title, builder in SECTIONS.items()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("page.html.j2").render(
        run_id=run.id, headline=_section("", headline, evidence), sections=sections
    )
    path = run.folder / "report.html"
    write_bytes(path, page.encode("utf-8", "replace"))
    return path


def _section(title: str, builder: Callable[[Evidence], Iterator[dict]], evidence: Evidence) -> dict:
    """A section and as many of its blocks as can be made."""
    blocks = []
    try:
        for block in builder(evidence):
            blocks.append(block)
    except Absent as absent:
        damaged = [f"{name} is damaged ({evidence.damaged[name]})" for name in absent.files if name in evidence.damaged]
        blocks.append({"text": ": ".join(["not done yet", *filter(None, ["; ".join(damaged)])]), "mood": "later"})
    except Exception as error:  # a damaged file can hold anything, and the report must come out
        said = f"not done yet, or not readable here ({type(error).__name__}: {error})"
        blocks.append({"text": said, "mood": "later"})
    return {"title": title, "anchor": re.sub(r"[^a-z]+", "-", title.lower()), "blocks": blocks}
