"""The written evidence of decisions on plans.

    approval.json       the decision in force; it carries a digest of itself, so one changed byte voids it
    approvals.jsonl     every decision and every launch, append-only
    approvals/          the plans decided on, by digest, so that a later refusal can name what changed
Only the words "approved" and "rejected" are decisions, and only true is a tick: "yes", "False", "" or 1 make the file no
approval. These files are evidence, not access control: who can write here can forge them.
"""

import getpass
import json
import socket
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, ValidationError

from eagle3_helpers import durable
from eagle3_helpers.errors import NotApproved
from eagle3_helpers.gate.plan import Plan, approval_file, approvals_folder, deciding, parse_plan
from eagle3_helpers.params import Section
from eagle3_helpers.runs import Run, now
from eagle3_helpers.training.locks import hold

Decision = Literal["approved", "rejected"]
Channel = Literal["widget", "command", "approve-as"]


def _ticked(value: bool) -> bool:
    if not value:
        raise ValueError("it is not ticked")
    return value


Tick = Annotated[bool, AfterValidator(_ticked)]  # Literal[True] would let 1 pass
LOCK_SECONDS = 30
OUTSIDE_DIGEST = ("digest", "redeemed_at")


class Approval(Section):
    """What approval.json holds; a rejection too. `digest` covers all but itself and `redeemed_at`."""

    decision: Decision
    approver: str  # as typed
    os_user: str
    host: str
    time: AwareDatetime
    expires: AwareDatetime
    channel: Channel
    plan_sha256: str
    ticks: dict[str, Tick]
    reason: str
    digest: str
    redeemed_at: AwareDatetime | None

    @property
    def who(self) -> str:
        return f"{self.approver} at {minute(self.time)}"


def minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def lock(run: Run) -> AbstractContextManager:
    """Held while a decision is written or used up. Raises CheckRefused where that does not come to its end elsewhere."""
    return hold(
        run.folder / "approval.lock",
        LOCK_SECONDS,
        f"another process decides on the plan of run {run.id}, or launches by it.",
        "Try again in a minute, and look what was decided.",
    )


def write_decision(
    run: Run, plan: Plan, decision: Decision, name: str, reason: str, channel: Channel, ticks: dict
) -> Approval:
    """Keeps the plan, adds to the log, and last puts the decision into force."""
    time = datetime.now(UTC)
    record = {
        "decision": decision,
        "approver": name,
        "os_user": getpass.getuser(),
        "host": socket.gethostname(),
        "time": time.isoformat(),
        "expires": (time + timedelta(hours=run.params.gate.approval_hours)).isoformat(),
        "channel": channel,
        "plan_sha256": plan.digest,
        "ticks": ticks,
        "reason": reason,
    }
    record = {**record, "digest": durable.digest(record), "redeemed_at": None}
    approval = Approval.model_validate_json(json.dumps(record))
    with lock(run):
        durable.write_bytes(_kept_plan(run, plan.digest), durable.canonical_json(plan.values))
        durable.append_lines(_log(run), [record])
        durable.write_json(approval_file(run), record)
    run.event(f"plan {decision}", plan=plan.digest, approver=name, channel=channel)
    return approval


def read_decision(run: Run) -> Approval | None:
    """The decision in force, None where there is none. Raises NotApproved where approval.json is not as it was written."""
    try:
        content = approval_file(run).read_bytes()
    except FileNotFoundError:
        return None
    try:
        approval = Approval.model_validate_json(content)
        body = {name: value for name, value in json.loads(content).items() if name not in OUTSIDE_DIGEST}
        if durable.digest(body) != approval.digest:
            raise ValueError("it was changed after it was written")
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "its text"
        raise NotApproved(f"approval.json is no approval: {place}: {problem['msg']}.") from error
    except ValueError as error:
        raise NotApproved(f"approval.json is no approval: {error}.") from error
    return approval


def mark_redeemed(run: Run, approval: Approval) -> None:
    """Uses the approval up. The log comes first: a crash in between leaves it used, never usable again."""
    time = now()
    line = {"decision": "redeemed", "approval": approval.digest, "plan_sha256": approval.plan_sha256, "time": time}
    durable.append_lines(_log(run), [line])
    durable.write_json(approval_file(run), {**json.loads(approval_file(run).read_bytes()), "redeemed_at": time})
    run.event("approval redeemed", plan=approval.plan_sha256, approver=approval.approver)


def redeemed(run: Run, approval: Approval) -> datetime | None:
    """When it was used: by the log, which a copy of an older approval.json does not undo."""
    times = [line["time"] for line in durable.read_lines(_log(run)) if line.get("approval") == approval.digest]
    return datetime.fromisoformat(times[0]) if times else approval.redeemed_at


def last_decided(run: Run) -> str | None:
    """Digest of the plan that was decided on last, by the log."""
    lines = [line for line in durable.read_lines(_log(run)) if line.get("decision") in ("approved", "rejected")]
    return lines[-1]["plan_sha256"] if lines else None


def decided_alike(run: Run, plan: Plan) -> dict | None:
    """The log's last decision on `plan`, or on one that differs in no deciding field: made again, it is the same plan."""
    alike = {plan.digest: True}
    for line in reversed(list(durable.read_lines(_log(run)))):
        old = line["plan_sha256"]
        if old not in alike:
            kept = decided_plan(run, old)
            alike[old] = kept is not None and deciding(kept.values) == deciding(plan.values)
        if line["decision"] in ("approved", "rejected") and alike[old]:
            return line
    return None


def decided_plan(run: Run, digest: str) -> Plan | None:
    """The plan with this digest, if it was decided on and its copy is whole."""
    try:
        plan = parse_plan(_kept_plan(run, digest).read_bytes(), run.id)
    except (OSError, ValueError):
        return None
    return plan if plan.digest == digest else None


def _kept_plan(run: Run, digest: str) -> Path:
    return approvals_folder(run) / f"{digest}.json"


def _log(run: Run) -> Path:
    return run.folder / "approvals.jsonl"
