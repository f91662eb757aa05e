import json

import pytest

from eagle3_helpers.durable import read_lines
from eagle3_helpers.errors import CheckRefused, NotApproved
from eagle3_helpers.gate.approval import require_approval
from eagle3_helpers.gate.widget import TICKS, approval_form
from tests.gate.conftest import written_plan


@pytest.fixture
def run(open_run):
    return open_run()


class Form:
    """The form's parts, as a person sees them."""

    def __init__(self, run):
        self.plan = written_plan(run)
        self.heading, *boxes, self.run_id, self.name, self.reason, buttons, self.message = approval_form(run).children
        self.boxes = dict(zip(TICKS, boxes, strict=True))
        self.approve, self.reject = buttons.children

    def fill(self, run_id: str, ticks=tuple(TICKS)) -> "Form":
        for name in ticks:
            self.boxes[name].value = True
        self.run_id.value, self.name.value, self.reason.value = run_id, "Ada", "the table is right"
        return self


def test_a_form_that_nobody_answers_approves_nothing(run):
    form = Form(run)
    assert form.plan.digest in form.heading.value
    assert [box.value for box in form.boxes.values()] == [False] * 4
    assert not (run.folder / "approval.json").exists()
    with pytest.raises(NotApproved, match="is not approved"):
        require_approval(run)


def test_a_filled_form_approves_the_plan_it_shows(run):
    form = Form(run).fill(run.id)
    assert not (run.folder / "approval.json").exists()  # typing decides nothing
    form.approve.click()
    assert "Approved" in form.message.value
    assert require_approval(run).digest == form.plan.digest
    record = json.loads((run.folder / "approval.json").read_bytes())
    assert record["ticks"] == dict.fromkeys(TICKS, True)
    assert (record["channel"], record["reason"]) == ("widget", "the table is right")


@pytest.mark.parametrize("left_out", TICKS)
def test_every_tick_is_needed(run, left_out):
    form = Form(run).fill(run.id, [name for name in TICKS if name != left_out])
    form.approve.click()
    assert f"not ticked: {left_out}" in form.message.value
    assert not (run.folder / "approval.json").exists()


@pytest.mark.parametrize("typed", ["", "tiny", "yes", "{id} ", "{ID}"])
def test_a_mistyped_run_id_approves_nothing(run, typed):
    form = Form(run).fill(typed.format(id=run.id, ID=run.id.upper()))
    form.approve.click()
    assert "Not approved" in form.message.value
    assert run.id in form.message.value
    assert not (run.folder / "approval.json").exists()


def test_an_empty_name_is_told_in_the_form(run):
    form = Form(run).fill(run.id)
    form.name.value = " "
    form.approve.click()
    assert "Nothing recorded" in form.message.value
    assert "the name is empty" in form.message.value


def test_reject_needs_no_ticks_and_is_recorded(run):
    form = Form(run)
    form.name.value, form.reason.value = "Grace", "<b>not yet</b>"
    form.reject.click()
    assert "Rejected" in form.message.value
    assert [line["decision"] for line in read_lines(run.folder / "approvals.jsonl")] == ["rejected"]
    with pytest.raises(NotApproved, match="rejected by Grace"):
        require_approval(run)


def test_a_form_left_open_does_not_approve_a_newer_plan(open_run, run):
    form = Form(run).fill(run.id)
    changed = open_run(training__lr=0.001)
    newer = written_plan(changed)
    form.approve.click()
    assert "Nothing recorded" in form.message.value
    assert newer.digest in form.message.value
    assert not (run.folder / "approval.json").exists()


def test_what_was_typed_is_shown_as_text_not_markup(run):
    form = Form(run).fill("<script>")
    form.approve.click()
    assert "<script>" not in form.message.value


def test_without_a_plan_there_is_no_form(run):
    with pytest.raises(CheckRefused, match="04_inspect_freeze"):
        approval_form(run)
