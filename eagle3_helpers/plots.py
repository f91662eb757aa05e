"""Figures of a run: numbers in, one matplotlib Figure out.

Every function is pure: it takes plain values, touches no pyplot state and draws "no ... yet" where there is nothing to
draw. A picture has no background and its ink and colours are of middle lightness, so that it reads on a white and on a
dark page; what colour tells, a marker or a line style tells too. `to_png_base64` and `to_svg` give bytes for a page; in a
notebook a figure shows itself.
"""

import base64
import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, PercentFormatter

INK = "#787878"
PALETTE = ("#2f7fc1", "#cf6a17", "#1f9268", "#a45fc2", "#d2484e", "#8a7a1c", "#5f7f95")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 2, 4, 2)), (0, (8, 3)))
STATE_COLORS = {
    **dict.fromkeys(("done", "approved"), PALETTE[2]),
    **dict.fromkeys(("failed", "rejected", "damaged"), PALETTE[4]),
    **dict.fromkeys(("stale", "unfinished", "waiting", "void"), PALETTE[1]),
}
MOST_POINTS = 150  # more optimizer steps than this are averaged in groups before they are drawn
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}  # a legend that covers no data
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


class Chart(Figure):
    """A Figure that a notebook shows as a picture without pyplot."""

    def _repr_png_(self) -> bytes:
        return _saved(self, "png", dpi=110)


def _drawn(draw: Callable) -> Callable:
    """matplotlib reads its style when an artist is made: all of `draw` runs under ours, and nothing else does."""

    @functools.wraps(draw)
    def styled(*values, **named):
        with matplotlib.rc_context(STYLE):
            return draw(*values, **named)

    return styled


@_drawn
def sequence_lengths(lengths: Sequence[int], max_length: int) -> Chart:
    """Histogram of tokens per sample, with the longest length allowed."""
    chart, (axes,) = _chart(1, (7, 2.8))
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return _nothing(chart, axes, "no samples yet")
    axes.hist(lengths, bins=min(40, max(5, len(lengths) // 4)), color=PALETTE[0], histtype="stepfilled")
    at_limit = int((lengths >= max_length).sum())
    axes.axvline(
        max_length, color=PALETTE[4], linestyle="--", label=f"max_length {max_length:,}: {at_limit:,} reach it"
    )
    median = float(np.median(lengths))
    axes.axvline(median, color=PALETTE[2], linestyle=":", label=f"median {median:,.0f}")
    axes.set(xlabel="length (tokens per sample)", ylabel="samples", xlim=(0, None))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return _legend(chart, axes, **ABOVE)


@_drawn
def vocab_coverage(sizes: Sequence[int], fractions: Sequence[float], chosen_size: int, chosen_coverage: float) -> Chart:
    """Fraction of supervised tokens inside the draft vocabulary, over its size; the chosen one is marked."""
    chart, (axes,) = _chart(1, (7, 2.8))
    if not len(sizes):
        return _nothing(chart, axes, "no draft vocabulary yet")
    axes.plot(sizes, fractions, color=PALETTE[0])
    axes.plot(
        [chosen_size],
        [chosen_coverage],
        color=PALETTE[1],
        marker="D",
        linestyle="none",
        label=f"chosen: {chosen_size:,} tokens cover {chosen_coverage:.2%}",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="draft vocabulary (tokens, log scale)", ylabel="supervised tokens inside", ylim=(None, 1.02))
    return _legend(chart, axes, loc="lower right")


@_drawn
def state_norms(norms: Mapping[str, Mapping]) -> Chart:
    """Norms of stored states per slot; each slot maps percentiles ("p1", "p50", ...) to a norm.

    A thin line joins the outermost percentiles, a thick one the next pair inside, a dot stands on the median.
    """
    chart, (axes,) = _chart(1, (7, 0.9 + 0.45 * max(2, len(norms))))
    if not norms:
        return _nothing(chart, axes, "no norms yet")
    names = set()
    for row, (slot, given) in enumerate(norms.items()):
        known = [(_percentile(name), value) for name, value in given.items() if _is_finite(value)]
        ranked = sorted((rank, value) for rank, value in known if rank is not None)
        values = [value for _, value in ranked]
        if not values:
            axes.text(0.01, row, f"{slot}: no finite norm", transform=axes.get_yaxis_transform(), va="center")
            continue
        color = PALETTE[row % len(PALETTE)]
        axes.plot([values[0], values[-1]], [row, row], color=color, linewidth=1.2)
        if len(values) >= 4:
            axes.plot([values[1], values[-2]], [row, row], color=color, linewidth=5, alpha=0.6, solid_capstyle="butt")
        median = min(ranked, key=lambda pair: abs(pair[0] - 50))[1]
        axes.plot([median], [row], color=color, marker=MARKERS[row % len(MARKERS)], markersize=7)
        axes.annotate(f"{median:,.3g}", (median, row), (0, 8), textcoords="offset points", ha="center", fontsize=8)
        names.add(", ".join(f"{rank:g}" for rank, _ in ranked))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    axes.set_yticks(range(len(norms)), [_plain(slot) for slot in norms])
    axes.set(xlabel=f"norm of a token's state (log scale), percentiles {'; '.join(sorted(names))}")
    axes.set_ylim(len(norms) - 0.4, -0.7)
    return chart


@_drawn
def alignment(slots: Mapping[str, Mapping]) -> Chart:
    """Mean cosine of stored states to the target's own h_{k-1}, h_k, h_{k+1}, as "below", "own", "above" of each slot.

    Aligned states stand at 1 for h_k and lower for its neighbours; where there is no neighbour (None) nothing is drawn.
    """
    chart, (axes,) = _chart(1, (7, 1.1 + 0.5 * max(2, len(slots))))
    if not slots:
        return _nothing(chart, axes, "no alignment proof yet")
    rows = np.arange(len(slots))
    for column, (name, label, size) in enumerate((("below", "h_{k-1}", 6), ("own", "h_k", 9), ("above", "h_{k+1}", 6))):
        cosines = [_number(given.get(name)) for given in slots.values()]
        axes.plot(
            cosines,
            rows,
            color=PALETTE[(1, 2, 3)[column]],
            linestyle="none",
            marker=(">", "o", "<")[column],
            markersize=size,
            label=f"${label}$",
        )
    axes.set_yticks(rows, [_plain(slot) for slot in slots])
    axes.set(xlabel="mean cosine to the target's own state", xlim=(None, 1.02))
    axes.set_ylim(len(slots) - 0.4, -0.6)
    return _legend(chart, axes, **ABOVE)


@_drawn
def training_curves(metrics: Sequence[Mapping]) -> Chart:
    """Loss and accuracy per TTT step, and tokens/s, over optimizer steps, from the records of `metrics.jsonl`.

    Lines are training steps, markers the held-out measurements. More than 150 steps are averaged in groups.
    """
    chart, panels = _chart(3, (11, 3.2), width_ratios=(4, 4, 2.6))
    trained = [record for record in metrics if "held_out" not in record and "step" in record]
    held_out = [{"step": record["step"], **record["held_out"]} for record in metrics if "held_out" in record]
    if not trained and not held_out:
        empty, (axes,) = _chart(1, (7, 1))
        return _nothing(empty, axes, "no training steps yet")
    for axes, field in zip(panels, ("loss_per_step", "accuracy_per_step"), strict=False):
        steps, values, group = _grouped(trained, field)
        held_steps, held_values, _ = _grouped(held_out, field)
        for ttt in range(max(values.shape[1], held_values.shape[1])):
            style = {"color": PALETTE[ttt % len(PALETTE)], "linewidth": 1}
            marker = MARKERS[ttt % len(MARKERS)]
            if ttt < values.shape[1]:
                dot = {"marker": marker, "markersize": 3} if len(steps) == 1 else {}
                axes.plot(steps, values[:, ttt], linestyle=LINES[ttt % len(LINES)], label=f"TTT {ttt}", **style, **dot)
            if ttt < held_values.shape[1]:
                axes.plot(held_steps, held_values[:, ttt], linestyle="none", marker=marker, markersize=5, **style)
        mean = f", mean of {group}" if group > 1 else ""
        axes.set_xlabel(f"optimizer step{mean}")
    panels[0].set(ylabel="loss (nats per token)", title="loss per TTT step")
    panels[1].set(ylabel="draft token right", title="accuracy per TTT step")
    panels[1].set_ylim(0, None)
    panels[1].yaxis.set_major_formatter(PercentFormatter(1))
    steps, speed, _ = _grouped([{**r, "speed": [r.get("tokens_per_second")]} for r in trained], "speed")
    if speed.size:
        panels[2].plot(steps, speed[:, 0], color=INK, linewidth=1, marker="o" if len(steps) == 1 else "")
    panels[2].set(xlabel="optimizer step", ylabel="tokens/s", title="training speed")
    panels[2].set_ylim(0, 1.1 * np.nanmax(speed, initial=1))
    panels[2].yaxis.set_major_formatter(THOUSANDS)
    last = max(record["step"] for record in (*trained, *held_out))
    for axes in panels:
        axes.set_xlim(0, last + max(1, 0.03 * last))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    note = "lines: training; markers: held out" if held_out else "lines: training; nothing held out measured yet"
    handles, labels = panels[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=8, title=note, title_fontsize=9)
    return chart


@_drawn
def acceptance_per_position(
    per_position: Sequence[float], untrained: Sequence[float] | None = None, bigram: Sequence[float] | None = None
) -> Chart:
    """Share of steps whose drafted tokens 1..j were all accepted, by position j in the chain."""
    chart, (axes,) = _chart(1, (5.5, 3))
    if not len(per_position):
        return _nothing(chart, axes, "no acceptance measured yet")
    for row, (name, values) in enumerate(
        (("trained draft", per_position), ("bigram", bigram), ("untrained", untrained))
    ):
        if values is None or not len(values):
            continue
        positions = range(1, len(values) + 1)
        numbers = [_number(value) for value in values]
        axes.plot(positions, numbers, color=PALETTE[row], marker=MARKERS[row], linestyle=LINES[row], label=name)
    for position, value in enumerate(per_position, 1):
        if _is_finite(value):
            axes.annotate(
                f"{value:.0%}", (position, value), (0, 7), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set(xlabel="position in the drafted chain", ylabel="steps with all accepted\nup to here", ylim=(0, 1.08))
    axes.set_xlim(0.6, len(per_position) + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return _legend(chart, axes) if len(axes.lines) > 1 else chart


@_drawn
def acceptance_by_category(categories: Mapping[str, tuple]) -> Chart:
    """Acceptance length per category as (value, low, high), the longest on top; 1 is what no draft gives."""
    chart, (axes,) = _chart(1, (5.5, 1 + 0.3 * max(3, len(categories))))
    if not categories:
        return _nothing(chart, axes, "no acceptance measured yet")
    ranked = sorted(categories.items(), key=lambda item: (-item[1][0], item[0]))
    for row, (_, (value, low, high)) in enumerate(ranked):
        if _is_finite(low) and _is_finite(high):
            axes.plot([low, high], [row, row], color=PALETTE[0], linewidth=2, alpha=0.6)
        axes.plot([value], [row], color=PALETTE[0], marker="o")
        axes.annotate(f"{value:.2f}", (value, row), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.axvline(1, color=PALETTE[1], linestyle="--", label="no draft")
    axes.set_yticks(range(len(ranked)), [_plain(name) for name, _ in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.8)
    axes.set(xlabel="acceptance length (tokens per forward of the target)", xlim=(0.9, None))
    return _legend(chart, axes, loc="lower right")


@_drawn
def stages(statuses: Sequence[tuple[str, str]]) -> Chart:
    """The story as one picture: stages in order as boxes, the approval between 04 and 05 as a diamond.

    `statuses` are (name, state) such as ("02_extract", "done"); an entry ("approval", state) gives the diamond its state.
    Empty states draw the story alone.
    """
    if not any(name == "approval" for name, _ in statuses):
        before = sum(name < "05" for name, _ in statuses)
        statuses = [*statuses[:before], ("approval", ""), *statuses[before:]]
    chart, (axes,) = _chart(1, (11, 1.5))
    axes.set_axis_off()
    for column, (name, state) in enumerate(statuses):
        word = state.split()[0].rstrip(",:;") if state.split() else ""
        edge = {"edgecolor": STATE_COLORS.get(word, INK), "facecolor": "none", "linewidth": 2}
        if word in ("", "to", "not"):
            edge |= {"edgecolor": INK, "linewidth": 1.2, "linestyle": "-" if not word else "--"}
        if name == "approval":
            axes.add_patch(Polygon([(column - 0.46, 0), (column, 0.62), (column + 0.46, 0), (column, -0.62)], **edge))
            axes.text(column, 0, "a person\napproves", ha="center", va="center", fontsize=8)
        else:
            box = FancyBboxPatch((column - 0.4, -0.42), 0.8, 0.84, boxstyle="round,pad=0,rounding_size=0.08", **edge)
            axes.add_patch(box)
            number, _, title = name.partition("_")
            axes.text(column, 0.17, number, ha="center", va="center", fontsize=8)
            axes.text(
                column, -0.1, title.replace("_", " ") or name, ha="center", va="center", fontsize=10, weight="bold"
            )
        axes.text(column, -0.78, state, ha="center", va="center", fontsize=9, color=edge["edgecolor"])
        if column:
            ahead = 0.46 if name == "approval" else 0.4
            behind = 0.46 if statuses[column - 1][0] == "approval" else 0.4
            axes.annotate(
                "", (column - ahead, 0), (column - 1 + behind, 0), arrowprops={"arrowstyle": "-|>", "color": INK}
            )
    axes.set(xlim=(-0.5, len(statuses) - 0.5), ylim=(-0.95, 0.7))
    return chart


def to_png_base64(figure: Figure) -> str:
    """PNG with a transparent background, as base64 text for a data URL."""
    return base64.b64encode(_saved(figure, "png", dpi=150)).decode()


def to_svg(figure: Figure) -> str:
    """One `<svg>` element, text kept as text, the same bytes for the same figure."""
    text = _saved(figure, "svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}).decode()
    return re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)


def _saved(figure: Figure, kind: str, **options) -> bytes:
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eagle3"}), io.BytesIO() as buffer:
        figure.savefig(buffer, format=kind, facecolor="none", **options)
        return buffer.getvalue()


def _chart(columns: int, size: tuple[float, float], **grid):
    chart = Chart(figsize=size, layout="constrained")
    return chart, chart.subplots(1, columns, squeeze=False, gridspec_kw=grid or None)[0]


def _legend(chart: Chart, axes, **place) -> Chart:
    axes.legend(**place)
    return chart


def _nothing(chart: Chart, axes, words: str) -> Chart:
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
    return chart


def _grouped(records: Sequence[Mapping], field: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Steps [n], values [n, columns] (NaN where a record has none) and how many records one point stands for."""
    width = max((len(record.get(field) or ()) for record in records), default=0)
    values = np.full((len(records), max(width, 1)), np.nan)
    for row, record in enumerate(records):
        given = [_number(value) for value in record.get(field) or ()]
        values[row, : len(given)] = given
    steps = np.array([record["step"] for record in records], dtype=np.float64)
    group = math.ceil(len(records) / MOST_POINTS)
    if group > 1:
        starts = np.arange(0, len(records), group)
        known = np.isfinite(values)
        counts = np.add.reduceat(known, starts, dtype=np.float64)
        sums = np.add.reduceat(np.where(known, values, 0), starts)
        values = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        steps = steps[np.minimum(starts + group - 1, len(records) - 1)]
    return steps, values if width else values[:, :0], max(group, 1)


def _percentile(name: str) -> float | None:
    """50 for "p50"; None for a name that is no percentile, such as "mean"."""
    found = re.fullmatch(r"p(\d+(?:\.\d+)?)", name)
    return float(found[1]) if found else None


def _number(value) -> float:
    return float(value) if _is_finite(value) else math.nan


def _is_finite(value) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _plain(name) -> str:
    """A label that matplotlib must not read as mathematics."""
    return str(name).replace("$", r"\$")
