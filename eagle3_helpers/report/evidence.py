"""What a run folder holds, read once for the report, whatever state it is in.

Other readers refuse a damaged file, because they act on it. A report only tells, so here damage is a finding like any
other: the file is named in `damaged` and what can be read of the rest is used.
"""

import json

from eagle3_helpers.durable import file_digest
from eagle3_helpers.runs import Run

STORY = ("01_recover", "02_extract", "03_verify", "04_inspect_freeze", "05_train", "06_evaluate")


class Evidence:
    """What the run folder holds, read once; `damaged` names every file that is there and cannot be used."""

    def __init__(self, run: Run):
        self.run, self.folder = run, run.folder
        self.damaged: dict[str, str] = {}
        self.events = self.lines("events.jsonl")
        self.receipts = {stage: receipt for stage in STORY if (receipt := self._receipt(stage))}
        self.plan, self.approval = self.json("plan.json"), self.json("approval.json")
        self.result, self.summary = self.json("training/result.json"), self.json("evaluation/summary.json")
        self.metrics = self.lines("training/metrics.jsonl")
        self.states = {stage: self._state(stage) for stage in STORY}

    def json(self, name: str) -> dict:
        """The object in a file; empty where there is none."""
        try:
            value = json.loads((self.folder / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            self.damaged[name] = str(error)
            return {}
        if not isinstance(value, dict):
            self.damaged[name] = f"holds a {type(value).__name__}, not an object"
            return {}
        return value

    def lines(self, name: str) -> list[dict]:
        """The records of a line file, those that can be read; a torn last line is what a crash leaves, not damage."""
        try:
            lines = (self.folder / name).read_bytes().split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.damaged[name] = str(error)
            return []
        records = []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                self.damaged.setdefault(name, f"line {number}: {error}")
                continue
            if isinstance(record, dict):
                records.append(record)
        return records

    def _receipt(self, stage: str) -> dict | None:
        name = f"receipts/{stage}.json"
        body = self.json(name)
        receipt = self.run.receipt(stage) if body else None
        if body and receipt is None:
            self.damaged[name] = "its digest is not that of its content"
        return receipt

    def _state(self, stage: str) -> tuple[str, str]:
        """(word, why) of a stage, as far as this folder tells: whatever lies outside it is for `status` to compare."""
        receipt = self.receipts.get(stage)
        if receipt:
            changed = self._changed(receipt)
            return ("stale", f"changed since: {', '.join(changed)}") if changed else ("done", "its receipt holds")
        last = next((event for event in reversed(self.events) if event.get("stage") == stage), None)
        if f"receipts/{stage}.json" in self.damaged:
            return "damaged", "its receipt cannot be used"
        if last is None:
            return "to do", "no receipt yet"
        if last.get("kind") == "stage failed":
            return "failed", str(last.get("error", ""))
        return "unfinished", f"attempt {last.get('attempt', '')} began and has no receipt"

    def _changed(self, receipt: dict) -> list[str]:
        """Names in a receipt whose file in this folder, or whose maker's receipt, says something else now."""
        made: dict = {}
        for stage in STORY[: STORY.index(receipt["stage"])]:
            made |= self.receipts.get(stage, {}).get("outputs", {})
        wrong = []
        for name, known in {**receipt.get("inputs", {}), **receipt.get("outputs", {})}.items():
            path = self.folder / name
            there = (file_digest(path) if path.is_file() else None) if path.suffix == ".json" else known
            remade = name in receipt.get("inputs", {}) and made.get(name, known) != known
            if there != known or remade:
                wrong.append(name)
        return wrong

    def gate(self) -> tuple[str, str]:
        """(word, why) of the approval between 04 and 05."""
        decision, approval = self.approval.get("decision"), self.approval
        if not self.plan:
            return "to do", "no plan yet"
        if decision not in ("approved", "rejected"):
            return "waiting", "no decision on the plan"
        who = f"by {approval.get('approver')} at {when(approval.get('time'))}: {approval.get('reason')}"
        if approval.get("plan_sha256") != file_digest(self.folder / "plan.json"):
            return "void", f"another plan was {decision} {who}"
        used = f"; launched at {when(approval['redeemed_at'])}" if approval.get("redeemed_at") else "; not launched yet"
        return decision, who + (used if decision == "approved" else "")


def when(time) -> str:
    """An ISO time to the second, as a person reads it; empty for none."""
    return str(time or "")[:19].replace("T", " ")
