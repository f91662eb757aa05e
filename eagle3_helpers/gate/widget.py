"""The form in which a person approves or rejects the plan.

Its buttons only write the record; the launch is another cell, which checks everything anew. So a form that nobody answers, as
in a headless run, does nothing, and what was typed into it never starts anything by itself. The form decides on the plan that
it showed: if the plan changed since, the click is refused.
"""

import html
from collections.abc import Callable

import ipywidgets

from eagle3_helpers.errors import Refusal
from eagle3_helpers.gate.approval import approve, reject
from eagle3_helpers.gate.approval_record import Approval, minute
from eagle3_helpers.gate.plan import Plan, read_plan
from eagle3_helpers.runs import Run

TICKS = {
    "data verified": "I have seen 03_verify: every stored byte was read, the alignment is proved.",
    "frozen set understood": "I know what trains and what stays frozen.",
    "GPUs free": "Nobody else needs the GPUs named in the plan, or it needs none.",
    "cost accepted": "Duration, energy and cost are accepted.",
}


def approval_form(run: Run) -> ipywidgets.VBox:
    """The form for the plan of `run` as it is now. Raises CheckRefused where there is no plan."""
    plan = read_plan(run)
    wide, label = ipywidgets.Layout(width="60em"), {"description_width": "9em"}
    boxes = {
        name: ipywidgets.Checkbox(description=f"{name}: {text}", indent=False, layout=wide)
        for name, text in TICKS.items()
    }
    run_id, name, reason = (
        ipywidgets.Text(description=title, placeholder=hint, layout=wide, style=label, continuous_update=True)
        for title, hint in (
            ("run id", "type the run id by hand"),
            ("your name", "who decides"),
            ("reason", "why this plan, or why not"),
        )
    )
    message = ipywidgets.HTML()
    yes = ipywidgets.Button(description="Approve", button_style="success")
    no = ipywidgets.Button(description="Reject", button_style="danger")

    def on_approve(_) -> None:
        open_ticks = [title for title, box in boxes.items() if box.value is not True]
        if open_ticks:
            message.value = _line("Not approved", f"not ticked: {', '.join(open_ticks)}.")
        elif run_id.value != run.id:
            message.value = _line("Not approved", f"the run id typed is {run_id.value!r}, this run is {run.id!r}.")
        else:
            ticks = {title: box.value for title, box in boxes.items()}
            message.value = _outcome(
                lambda: approve(run, plan.digest, name.value, reason.value, "widget", ticks), "Approved"
            )

    def on_reject(_) -> None:
        message.value = _outcome(lambda: reject(run, plan.digest, name.value, reason.value, "widget"), "Rejected")

    yes.on_click(on_approve)
    no.on_click(on_reject)
    return ipywidgets.VBox(
        [
            ipywidgets.HTML(_heading(run, plan)),
            *boxes.values(),
            run_id,
            name,
            reason,
            ipywidgets.HBox([yes, no]),
            message,
        ]
    )


def _heading(run: Run, plan: Plan) -> str:
    return (
        f"<b>Plan {plan.digest[:12]} of run {html.escape(run.id)}</b>, sha256 <code>{plan.digest}</code><br>"
        f"An approval counts for {run.params.gate.approval_hours:g} hours and one launch."
    )


def _outcome(decide: Callable[[], Approval], done: str) -> str:
    """What the click did, or why it did nothing: an error in a callback would otherwise be seen by nobody."""
    try:
        record = decide()
    except (Refusal, OSError) as error:
        return _line("Nothing recorded", str(error))
    after = f"until {minute(record.expires)}. Now run the launch cell." if done == "Approved" else "and recorded."
    return _line(done, f"by {record.approver}, plan {record.plan_sha256[:12]}, {after}")


def _line(verdict: str, text: str) -> str:
    return f"<b>{html.escape(verdict)}</b>: {html.escape(text)}"
