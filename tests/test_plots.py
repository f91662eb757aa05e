"""Figures: drawn from few and many numbers, readable on white and on black, the same bytes each time."""

import base64
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from eagle3_helpers import plots
from tests.test_report import metrics

STORY = ["01_recover", "02_extract", "03_verify", "04_inspect_freeze", "approval", "05_train", "06_evaluate"]
FIGURES = {
    "lengths": lambda: plots.sequence_lengths([5, 9, 200, 200], 200),
    "no lengths": lambda: plots.sequence_lengths([], 200),
    "vocabulary": lambda: plots.vocab_coverage([8, 64, 512], [0.4, 0.8, 1.0], 64, 0.8),
    "norms": lambda: plots.state_norms(
        {"h_2": {"mean": 3.0, "p1": 1.0, "p50": 3.0, "p99": 90.0}, "last": {"mean": None}}
    ),
    "no norms": lambda: plots.state_norms({}),
    "alignment": lambda: plots.alignment({"last": {"below": 0.4, "own": 1.0, "above": None}}),
    "curves": lambda: plots.training_curves(metrics(60)),
    "positions": lambda: plots.acceptance_per_position([0.5, 0.2], [0.1, 0.0], [0.3, 0.1]),
    "categories": lambda: plots.acceptance_by_category({"math $x$": (2.0, 1.8, 2.2), "one prompt": (1.4, None, None)}),
    "stages": lambda: plots.stages([(name, "done") for name in STORY]),
    "story": lambda: plots.stages([(name, "") for name in STORY]),
}


def words(figure) -> str:
    """All texts of a figure, as its SVG has them."""
    return " ".join(
        "".join(node.itertext()) for node in ElementTree.fromstring(plots.to_svg(figure)).iter() if "text" in node.tag
    )


def lines(axes) -> list:
    return [line for line in axes.lines if line.get_linestyle() != "None"]


def marks(axes) -> list:
    return [line for line in axes.lines if line.get_linestyle() == "None"]


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_every_figure_is_a_picture_without_background_and_the_same_each_time(draw):
    first, second = plots.to_svg(draw()), plots.to_svg(draw())
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert "<metadata" not in first and not re.search(r"fill: #(fff|000)", first)
    assert base64.b64decode(plots.to_png_base64(draw())).startswith(b"\x89PNG")


def test_ink_and_colours_stand_out_from_white_and_from_a_dark_page():
    for color in (plots.INK, *plots.PALETTE):
        assert _contrast(color, "#ffffff") >= 3 and _contrast(color, "#1e1e1e") >= 3, color


def test_what_colour_tells_a_marker_and_a_line_style_tell_too():
    assert len(plots.PALETTE) == len(set(plots.MARKERS)) == len(set(plots.LINES)) >= 7


def test_drawing_leaves_the_settings_of_matplotlib_and_pyplot_alone():
    code = (
        "import sys, matplotlib; from eagle3_helpers import plots; before = matplotlib.rcParams.copy()\n"
        "plots.to_svg(plots.stages([('01_recover', 'done')]))\n"
        "assert matplotlib.rcParams.copy() == before and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_figure_shows_itself_in_a_notebook():
    assert plots.stages([("01_recover", "done")])._repr_png_().startswith(b"\x89PNG")


def test_lengths_say_how_many_reach_the_limit():
    assert "max_length 200: 2 reach it" in words(plots.sequence_lengths([5, 9, 200, 200], 200))


def test_curves_of_no_line_say_so():
    assert words(plots.training_curves([])) == "no training steps yet"


def test_curves_of_one_line_are_dots_without_held_out_marks():
    chart = plots.training_curves(metrics(1))
    loss, accuracy, _ = chart.axes
    assert [line.get_marker() for line in lines(loss)] == list(plots.MARKERS[:3])
    assert not marks(loss) and not marks(accuracy)
    assert "nothing held out measured yet" in words(chart)


def test_curves_have_a_line_per_ttt_step_and_marks_where_something_was_held_out():
    loss, accuracy, speed = plots.training_curves(metrics(60)).axes
    for axes in (loss, accuracy):
        assert len(lines(axes)) == len(marks(axes)) == 3
        assert list(marks(axes)[0].get_xdata()) == [20, 40, 60]
    assert list(lines(speed)[0].get_ydata()[:2]) == [4001.0, 4002.0]


def test_ten_thousand_lines_are_averaged_in_groups_and_end_at_the_last_step():
    records = metrics(10_000)
    chart = plots.training_curves(records)
    line = lines(chart.axes[0])[0]
    assert len(line.get_xdata()) <= plots.MOST_POINTS and line.get_xdata()[-1] == 10_000
    first = [record["loss_per_step"][0] for record in records if "held_out" not in record][:67]
    assert line.get_ydata()[0] == pytest.approx(np.mean(first))
    assert "mean of 67" in words(chart)


def test_numbers_that_are_missing_or_not_finite_leave_a_gap():
    records = metrics(3)
    records[1] |= {"loss_per_step": None, "accuracy_per_step": [0.1], "tokens_per_second": None}
    records[2] |= {"loss_per_step": [float("nan"), 1.0, 2.0]}
    loss, accuracy, speed = plots.training_curves(records).axes
    assert np.isnan(lines(loss)[0].get_ydata()).tolist() == [False, True, True]
    assert np.isnan(lines(accuracy)[1].get_ydata()).tolist() == [False, True, False]
    assert np.isnan(lines(speed)[0].get_ydata()).tolist() == [False, True, False]


def test_categories_are_ranked_by_their_value():
    chart = plots.acceptance_by_category({"b": (1.2, 1.1, 1.3), "a": (1.9, 1.8, 2.0), "c": (1.2, 1.0, 1.4)})
    assert [label.get_text() for label in chart.axes[0].get_yticklabels()] == ["a", "b", "c"]


def test_the_story_names_each_stage_and_its_state():
    text = words(plots.stages([("04_inspect_freeze", "done"), ("approval", "waiting"), ("05_train", "to do")]))
    for word in ("inspect freeze", "a person", "approves", "waiting", "to do"):
        assert word in text


def test_the_approval_stands_between_inspect_and_train_even_without_a_state():
    chart = plots.stages([(name, "done") for name in STORY if name != "approval"])
    order = [text.get_text() for text in chart.axes[0].texts if text.get_text()]
    assert order.index("inspect freeze") < order.index("a person\napproves") < order.index("train")


def _contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two colours."""
    light = sorted((_luminance(one), _luminance(other)))
    return (light[1] + 0.05) / (light[0] + 0.05)


def _luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
