"""Progress of long work: a bar for a person who watches, a line every few seconds for a log; both with rate and ETA."""

import sys

from tqdm.auto import tqdm as notebook_or_terminal
from tqdm.std import tqdm as plain

from eagle3_helpers.display import seconds_text

LOG_SECONDS = 10


def someone_watches() -> bool:
    """True in a terminal or a notebook with a front end; False under papermill and in logs. For display, never for authority."""
    try:
        from IPython import get_ipython

        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:
            return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))
    except ImportError:
        pass
    return sys.stderr.isatty()


class Progress:
    """Counts `total` units, e.g. Progress("extract", 300, "samples"); add(n, note) as they are done."""

    def __init__(self, title: str, total: int, unit: str, done: int = 0):
        self.title = title
        if someone_watches():
            self.bar = notebook_or_terminal(total=total, initial=done, desc=title, unit=f" {unit}")
        else:
            self.bar = plain(
                total=total,
                initial=done,
                desc=title,
                unit=f" {unit}",
                file=_Lines(),
                mininterval=LOG_SECONDS,
                ncols=100,
                ascii=True,
            )

    def add(self, count: int = 1, note: str = "") -> None:
        if note:
            self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(count)

    @property
    def seconds(self) -> float:
        return self.bar.format_dict["elapsed"]

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind, *_) -> None:
        self.bar.close()
        ended = "stopped after" if kind else "took"
        print(f"{self.title}: {self.bar.n:,} of {self.bar.total:,}, {ended} {seconds_text(self.seconds)}", flush=True)


class _Lines:
    """A stream that turns tqdm's redrawn line into whole lines."""

    def write(self, text: str) -> None:
        line = text.replace("\r", "").strip()
        if line:
            print(line, flush=True)

    def flush(self) -> None:
        sys.stdout.flush()
