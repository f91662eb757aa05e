"""Approve, check, redeem: the three acts between a frozen plan and a launch.

A person approves one plan by the sha256 of its bytes. The approval counts for that plan only, for a few hours, and for one
launch; right before the launch the world is looked at again (same data and code, room on the disk, GPUs free, nobody else training).
Without a valid approval nothing starts: an absent, unreadable or unknown answer is a no. Every refusal says in one sentence
why, and with which command the present plan is approved.
"""

import re
from datetime import UTC, datetime

from eagle3_helpers.display import Table
from eagle3_helpers.errors import BadParams, CheckRefused, NotApproved
from eagle3_helpers.gate.approval_record import (
    Approval,
    Channel,
    Decision,
    decided_alike,
    decided_plan,
    last_decided,
    lock,
    mark_redeemed,
    minute,
    read_decision,
    redeemed,
    write_decision,
)
from eagle3_helpers.gate.live_checks import live_checks
from eagle3_helpers.gate.plan import Plan, compare, deciding, plan_file, read_plan
from eagle3_helpers.runs import Run
from eagle3_helpers.training.differences import told


def approve(run: Run, digest: str, name: str, reason: str, channel: Channel, ticks: dict | None = None) -> Approval:
    """Approves the current plan, which `digest` must name in full. `ticks`: {what was confirmed: True}.

    Raises BadParams for a digest that is not 64 hex, an empty name or reason, or a tick that is not True; CheckRefused
    where the current plan is another one.
    """
    return _decide(run, "approved", digest, name, reason, channel, ticks or {})


def reject(run: Run, digest: str, name: str, reason: str, channel: Channel) -> Approval:
    """Rejects the current plan; asked for and recorded like an approval. An earlier approval is void from here on."""
    return _decide(run, "rejected", digest, name, reason, channel, {})


def auto_approve(run: Run, name: str) -> Approval:
    """Approves a plan that costs no more than gate.auto_approve_max_gpu_hours.

    Raises NotApproved above that, and where a person rejected this plan: only a person takes that back.
    """
    plan, limit = read_plan(run), run.params.gate.auto_approve_max_gpu_hours
    last = decided_alike(run, plan)
    if last and last["decision"] == "rejected":
        when = minute(datetime.fromisoformat(last["time"]))
        raise NotApproved(
            f"this plan was rejected by {last['approver']} at {when}: {last['reason']}; --approve-as does not override that.",
            _how_to_approve(run, plan),
        )
    hours = plan.values["estimate"]["gpu_hours"]
    if hours > limit:
        raise NotApproved(
            f"the plan needs {hours:.3g} GPU hours, and --approve-as goes up to gate.auto_approve_max_gpu_hours {limit:g}.",
            _how_to_approve(run, plan),
        )
    reason = f"--approve-as: {hours:.3g} GPU hours, gate.auto_approve_max_gpu_hours {limit:g}"
    return approve(run, plan.digest, name, reason, "approve-as")


def require_approval(run: Run) -> Plan:
    """The plan, if it may be launched now. Raises NotApproved, or CheckRefused where plan, data, disk or GPUs are not fit."""
    plan = read_plan(run)
    _approval_in_force(run, plan)
    live_checks(run, plan).require()
    return plan


def redeem(run: Run) -> Plan:
    """Uses the approval up and returns its plan: the launch must follow. Of two calls at once, one is refused."""
    with lock(run):
        plan = require_approval(run)
        mark_redeemed(run, _approval_in_force(run, plan))
    return plan


def gate_state(run: Run) -> str:
    """One word for the board: "no plan", "waiting" or "approved"."""
    try:
        _approval_in_force(run, read_plan(run))
    except CheckRefused:
        return "no plan"
    except NotApproved:
        return "waiting"
    return "approved"


def approval_status(run: Run) -> Table:
    """The plan, the decision on it, and whether it would let a launch through (live checks apart)."""
    rows = []
    try:
        plan = read_plan(run)
        rows.append(["plan", plan.digest])
        decision = read_decision(run)
        if decision:
            rows += [
                ["decision", f"{decision.decision} by {decision.who} ({decision.channel}): {decision.reason}"],
                ["for plan", decision.plan_sha256],
                ["expires", minute(decision.expires)],
            ]
        _approval_in_force(run, plan)
        rows.append(["allows a launch", "yes, one"])
    except (CheckRefused, NotApproved) as refusal:
        rows.append(["allows a launch", f"no: {refusal.what}"])
    return Table(["approval", ""], rows)


def _decide(
    run: Run, decision: Decision, digest: str, name: str, reason: str, channel: Channel, ticks: dict
) -> Approval:
    plan = read_plan(run)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise BadParams(
            f"{digest!r} is not the sha256 of a plan; the current plan is {plan.digest}.", "Give all 64 characters."
        )
    if digest != plan.digest:
        raise CheckRefused(
            f"the digest given is {digest}, the current plan is {plan.digest}{_what_changed(run, digest, plan)}.",
            "Read the current plan, then decide on its digest.",
        )
    for what, text in (("name", name), ("reason", reason)):
        if not text.strip():
            raise BadParams(f"the {what} is empty.", "Say who decides, and why.")
    for what, tick in ticks.items():
        if tick is not True:
            raise BadParams(f"{what!r} is not confirmed ({tick!r}).", "Only a real tick counts.")
    return write_decision(run, plan, decision, name.strip(), reason.strip(), channel, ticks)


def _approval_in_force(run: Run, plan: Plan) -> Approval:
    """The approval that lets this plan start. Raises NotApproved with the one sentence that says why there is none."""
    how = _how_to_approve(run, plan)
    try:
        approval = read_decision(run)
    except NotApproved as refusal:
        raise NotApproved(refusal.what, how) from refusal
    decided_on = approval.plan_sha256 if approval else last_decided(run)
    if decided_on not in (None, plan.digest):
        raise NotApproved(
            f"the {'rejection' if approval and approval.decision == 'rejected' else 'approval'} is for plan "
            f"{decided_on[:12]}…, the current plan is {plan.digest[:12]}…{_what_changed(run, decided_on, plan)}.",
            how,
        )
    if approval is None:
        raise NotApproved(f"plan {plan.digest[:12]} of run {run.id} is not approved.", how)
    if approval.decision == "rejected":
        raise NotApproved(f"plan {plan.digest[:12]} was rejected by {approval.who}: {approval.reason}.", how)
    if approval.expires <= datetime.now(UTC):
        raise NotApproved(f"the approval by {approval.who} expired at {minute(approval.expires)}.", how)
    used = redeemed(run, approval)
    if used:
        raise NotApproved(
            f"the approval by {approval.who} was used for a launch at {minute(used)}; it counts once.", how
        )
    return approval


def _what_changed(run: Run, old_digest: str, plan: Plan) -> str:
    """` (changed: spec.training.lr 0.0001 -> 0.001)`, or nothing where the old plan is not kept."""
    old = decided_plan(run, old_digest)
    if old is None:
        return ""
    changes = compare(old, plan)
    decide = {*deciding(old.values), *deciding(plan.values)}
    named = [change for change in changes if change[0] in decide] or changes
    return f" (changed: {told(named)})"


def _how_to_approve(run: Run, plan: Plan) -> str:
    return (
        f"Read the plan (04_inspect_freeze shows it, {plan_file(run)} holds it), then: "
        f"eagle3-runbook approve --run {run.id} --digest {plan.digest} --name YOUR_NAME --reason WHY"
    )
