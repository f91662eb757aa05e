"""The sections of the report: each turns evidence into blocks, in the order in which they are read.

A block is a text (with a verdict word or a mood), a table, a list of checks or a figure; the template `page.html.j2`
knows how each looks. A section is a generator, so what it made before it met something unreadable is kept.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from html import escape

import yaml
from markupsafe import Markup
from matplotlib.figure import Figure

from eagle3_helpers import plots
from eagle3_helpers.display import Table, seconds_text
from eagle3_helpers.draft.freeze import FreezeTable, Row
from eagle3_helpers.gate.plan import parse_plan
from eagle3_helpers.report.evidence import STORY, Evidence, when
from eagle3_helpers.samples.accounting import accounting_table

RECOVER, EXTRACT, VERIFY, INSPECT, TRAIN, EVALUATE = STORY
EVENTS_SHOWN = 40
LONGEST_CELL = 600  # characters of a list or a text in a table
EVENT_ENVELOPE = ("time", "kind", "stage", "attempt", "pid", "host", "pid_started")


class Absent(Exception):
    """A section that has nothing to show; `files` would hold it."""

    def __init__(self, *files: str):
        super().__init__(*files)
        self.files = files


def headline(evidence: Evidence) -> Iterator[dict]:
    """What was achieved in one line, and the state of each stage."""
    statuses = [(stage, state) for stage, (state, _) in evidence.states.items()]
    statuses.insert(STORY.index(INSPECT) + 1, ("approval", evidence.gate()[0]))
    try:
        yield from _achieved(evidence.summary)
    except (KeyError, TypeError, ValueError):
        waiting = [stage for stage, (state, _) in evidence.states.items() if state != "done"]
        yield _text(f"Acceptance not measured yet. Next: {waiting[0] if waiting else EVALUATE}.", "lead")
    yield _figure(plots.stages(statuses), "; ".join(f"{stage} {state}" for stage, state in statuses))
    if evidence.damaged:
        yield _table(["damaged file", "what is wrong"], [list(item) for item in evidence.damaged.items()])


def _achieved(summary: dict) -> Iterator[dict]:
    length, (low, high) = summary["acceptance_length"], summary["acceptance_interval"]
    bigram, untrained = summary["acceptance_length_bigram"], summary["acceptance_length_untrained"]
    lead = (
        f"Acceptance length {length:.2f} [{low:.2f}, {high:.2f}] on {summary['n_prompts']:,} prompts; "
        f"a bigram table gives {bigram:.2f}, the same draft untrained {untrained:.2f}."
    )
    yield _text(lead, "lead")
    better = low > max(bigram, untrained)
    yield _verdict(better, f"the interval {'lies' if better else 'does not lie'} above both")
    yield _lossless(summary)


def _stages(evidence: Evidence) -> Iterator[dict]:
    rows = []
    for stage, (state, why) in evidence.states.items():
        receipt = evidence.receipts.get(stage, {})
        checks = receipt.get("checks", [])
        attempts = [e for e in evidence.events if e.get("kind") == "stage started" and e.get("stage") == stage]
        passed = f"{sum(bool(check['ok']) for check in checks)} of {len(checks)} OK" if receipt else ""
        times = [when(receipt.get("started")), _duration(receipt)]
        rows.append([stage, state, why, *times, len(attempts), passed])
        if stage == INSPECT:
            rows.append(["approval", *evidence.gate(), when(evidence.approval.get("time")), "", "", ""])
    yield _table(["stage", "state", "why", "started (UTC)", "took", "attempts", "checks"], rows)


def _recovery(evidence: Evidence) -> Iterator[dict]:
    found, redone = (evidence.receipts.get(stage, {}) for stage in (RECOVER, EXTRACT))
    before = evidence.json("recovery.json")
    if not found and not redone:
        raise Absent(f"receipts/{RECOVER}.json", f"receipts/{EXTRACT}.json")
    if found:
        cut_off = ", ".join(found["interrupted"]) or "none"
        put_right = f"files moved to quarantine: {found['quarantined']:,}, adopted: {found['adopted']:,}"
        yield _text(f"Attempts cut off by a crash: {cut_off}. {found['survived']:,} samples had survived; {put_right}.")
        yield _records(before.get("findings", []), "found damaged or unlisted")
        yield _records(before.get("checkpoints", []), "checkpoints found")
        yield _checks_of(evidence, RECOVER)
    else:
        yield _text(f"{RECOVER}: not done yet", "later")
    if redone:
        yield _text(f"Already stored: {redone['stored_before']:,} samples. Extracted then: {redone['stored_now']:,}.")
        yield _facts(redone.get("captured", {}), "the extraction")
        yield _checks_of(evidence, EXTRACT)
    else:
        yield _text(f"{EXTRACT}: not done yet", "later")
    failed = [event for event in evidence.events if event.get("kind") == "stage failed"]
    rows = [[when(event.get("time")), event.get("attempt"), event.get("error")] for event in failed]
    yield _table(["time (UTC)", "attempt", "error"], rows, "attempts that ended without a receipt")


def _data(evidence: Evidence) -> Iterator[dict]:
    pointer, receipt = evidence.json("samples.json"), evidence.receipts.get(EXTRACT, {})
    if not pointer:
        raise Absent("samples.json")
    folder = evidence.folder / pointer["folder"]  # an absolute path stays itself
    account = receipt.get("samples") or evidence.json(str(folder / "accounting.json")).get("accounting")
    lengths = [sample["n_tokens"] for sample in evidence.lines(str(folder / "samples.jsonl"))]
    if not account or not lengths:
        yield _text(f"the sample table {folder} is not on this machine, or damaged", "later")
    if account:
        read, accepted, duplicates = (account[name] for name in ("read", "accepted", "duplicates"))
        rejected = sum(account["rejected"].values())
        equation = f"read {read:,} = accepted {accepted:,} + rejected {rejected:,} + duplicates {duplicates:,}"
        yield _verdict(read == accepted + rejected + duplicates, equation)
        yield {"table": accounting_table(account, "")}
    if lengths:
        chart = plots.sequence_lengths(lengths, evidence.run.params.samples.max_length)
        yield _figure(chart, f"Tokens per sample: {len(lengths):,} samples, {sum(lengths):,} tokens")
    if receipt:
        size = evidence.run.params.draft.vocab_size
        said = f"{receipt['supervised']:,} of {receipt['tokens']:,} tokens are supervised"
        yield _text(f"{said}; the draft vocabulary of {size:,} covers {receipt['coverage']:.2%} of them.")


def _verification(evidence: Evidence) -> Iterator[dict]:
    verification = evidence.json("verification.json")
    if not verification:
        raise Absent("verification.json")
    checks = evidence.receipts.get(VERIFY, verification)["checks"]  # the receipt's include those of the alignment
    passed = sum(bool(check["ok"]) for check in checks)
    yield _verdict(0 < len(checks) == passed, f"{passed} of {len(checks)} checks hold")
    yield _checks(checks)
    yield _facts(verification.get("totals", {}), "totals")
    yield _records(verification.get("findings", []), "bad samples")
    yield _figure(plots.state_norms(verification.get("norms", {})), "Norms of the stored states")
    proof = verification.get("alignment", {})
    yield _figure(plots.alignment(proof.get("slots", {})), "Stored states against the target's own")
    yield _facts({name: value for name, value in proof.items() if name != "slots"}, "alignment proof")


def _freeze(evidence: Evidence) -> Iterator[dict]:
    saved = evidence.json("freeze_table.json")
    if not saved:
        raise Absent("freeze_table.json")
    table = FreezeTable([Row(**row) for row in saved["rows"]])
    yield _text(f"{table.summary}.")
    yield {"table": table.table()}
    yield _checks_of(evidence, INSPECT)


def _plan(evidence: Evidence) -> Iterator[dict]:
    if not evidence.plan:
        raise Absent("plan.json")
    word, why = evidence.gate()
    yield _text(f"Approval: {word}, {why}.")
    yield _facts(evidence.approval, "the decision in force")
    decisions = [
        [
            when(one.get("time")),
            *(one.get(name) for name in ("decision", "approver", "channel", "reason")),
            _plan_of(one),
        ]
        for one in evidence.lines("approvals.jsonl")
    ]
    yield _table(["time (UTC)", "decision", "by", "through", "reason", "plan"], decisions, "every decision and launch")
    yield {"table": parse_plan((evidence.folder / "plan.json").read_bytes(), evidence.run.id).table()}


def _plan_of(decision: dict) -> str:
    return str(decision.get("plan_sha256", ""))[:12]


def _training(evidence: Evidence) -> Iterator[dict]:
    result, metrics = evidence.result, evidence.metrics
    if not result and not metrics:
        raise Absent("training/metrics.jsonl", "training/result.json")
    if result:
        unchanged = result.get("frozen_unchanged") is True
        yield _verdict(unchanged, f"frozen weights {'are bit for bit what they were' if unchanged else 'changed'}")
        yield _facts(result, "result")
    else:
        yield _text("result: not done yet", "later")
    yield _checks_of(evidence, TRAIN)
    yield _figure(plots.training_curves(metrics), "Training curves")
    held_out = [record for record in metrics if "held_out" in record]
    trained = [record for record in metrics if "held_out" not in record]
    for records, name in ((held_out, "last held-out measurement"), (trained, "last optimizer step")):
        yield _facts(records[-1] if records else {}, name)


def _evaluation(evidence: Evidence) -> Iterator[dict]:
    summary = evidence.summary
    if not summary:
        raise Absent("evaluation/summary.json")
    yield _verdict(summary.get("verdict") == "draft used", f"verdict: {summary.get('verdict', 'none recorded')}")
    yield _lossless(summary)
    yield _figure(
        plots.acceptance_per_position(summary["per_position"]), "Acceptance per position of the drafted chain"
    )
    yield from _accuracy_beside_acceptance(evidence, summary["per_position"])
    categories = {
        name: (part["acceptance_length"], *part["acceptance_interval"])
        for name, part in summary["per_category"].items()
        if part["acceptance_length"] is not None
    }
    yield _figure(plots.acceptance_by_category(categories), "Acceptance length by category, with 95 % intervals")
    yield _facts(summary, "all numbers")


def _accuracy_beside_acceptance(evidence: Evidence, per_position: list) -> Iterator[dict]:
    """Rows right in training and wrong in serving mean that the two do not see the same thing."""
    held_out = [record["held_out"] for record in evidence.metrics if "held_out" in record]
    if not held_out:
        return
    alone, given_before = (held_out[-1].get(name) or [] for name in ("accuracy_per_step", "conditional_accuracy"))
    rows, reached = [], 1.0
    for place, accepted in enumerate(per_position):
        reached *= given_before[place] if place < len(given_before) else math.nan
        rows.append([place + 1, *map(_percent, (alone[place] if place < len(alone) else None, reached, accepted))])
    headings = ["position", "held-out accuracy", "held out, right up to here", "decoding, accepted up to here"]
    yield _table(headings, rows, "training accuracy beside acceptance")


def _lineage(evidence: Evidence) -> Iterator[dict]:
    receipts = evidence.receipts
    if not receipts:
        raise Absent(*(f"receipts/{stage}.json" for stage in STORY))
    names = list(dict.fromkeys(name for receipt in receipts.values() for name in receipt["versions"]))
    who = [
        [stage, receipt["user"], receipt["host"], receipt["commit"].get("commit"), receipt["commit"].get("dirty")]
        for stage, receipt in receipts.items()
    ]
    yield _table(["stage", "user", "host", "commit", "files differ from it"], who, "who, where, which code")
    found = [[stage, *(receipt["versions"].get(name) for name in names)] for stage, receipt in receipts.items()]
    yield _table(["stage", *names], found, "versions")
    digests = [
        [stage, "read" if kind == "inputs" else "wrote", name, value]
        for stage, receipt in receipts.items()
        for kind in ("inputs", "outputs")
        for name, value in receipt[kind].items()
    ]
    yield _table(["stage", "", "what", "digest"], digests, "lineage")
    yield _facts(yaml.safe_load((evidence.folder / "params.yaml").read_text(encoding="utf-8")), "params in force")


def _events(evidence: Evidence) -> Iterator[dict]:
    if not evidence.events:
        raise Absent("events.jsonl")
    rows = []
    for event in evidence.events[-EVENTS_SHOWN:]:
        said = ", ".join(f"{name}: {_short(value)}" for name, value in event.items() if name not in EVENT_ENVELOPE)
        rows.append([when(event.get("time")), event.get("kind"), event.get("attempt") or event.get("stage"), said])
    caption = f"the last {len(rows):,} of {len(evidence.events):,}"
    yield _table(["time (UTC)", "event", "attempt", "with"], rows, caption)


SECTIONS = {
    "Stages": _stages,
    "Recovery": _recovery,
    "Data": _data,
    "Store and alignment": _verification,
    "What trains, what is frozen": _freeze,
    "Plan and approval": _plan,
    "Training": _training,
    "Evaluation": _evaluation,
    "Environment and lineage": _lineage,
    "Last events": _events,
}


def _lossless(summary: dict) -> dict:
    wrong, prompts = summary["lossless_mismatches"], summary["n_prompts"]
    same = f"every one of the {prompts:,} answers is the target's own, numerical ties aside"
    return _verdict(not wrong, f"{wrong:,} of {prompts:,} answers differ beyond numerical ties" if wrong else same)


def _text(text: str, mood: str = "") -> dict:
    return {"text": text, "mood": mood}


def _verdict(ok: bool, text: str) -> dict:
    return {"text": text, "mood": "", "verdict": bool(ok)}


def _table(headings: list[str], rows: list[list], caption: str = "") -> dict:
    return {"table": Table(headings, rows, caption)}


def _records(records: list[dict], caption: str) -> dict:
    """A table of like records; its headings are their names in the order of their first appearance."""
    names = list(dict.fromkeys(name for record in records for name in record))
    return _table(names, [[_short(record.get(name)) for name in names] for record in records], caption)


def _facts(values: dict, caption: str = "") -> dict:
    """Every plain value under its name, nested names joined by dots."""
    return _table(["name", "value"], list(_flat(values)), caption)


def _flat(values: dict, prefix: str = "") -> Iterator[list]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield [f"{prefix}{name}", _short(value)]


def _checks(items: list[dict], title: str = "") -> dict:
    shown = [{name: item.get(name) for name in ("ok", "check", "expected", "observed", "remedy")} for item in items]
    return {"checks": shown, "title": title}


def _checks_of(evidence: Evidence, stage: str) -> dict:
    return _checks(evidence.receipts.get(stage, {}).get("checks", []), f"checks of {stage}")


def _figure(figure: Figure, caption: str) -> dict:
    """Inline SVG whose ink is the page's own and whose ids are no other figure's."""
    own = re.sub(r"\W+", "-", caption.lower())[:24]
    svg = re.sub(r"<style.*?</style>", "", plots.to_svg(figure), flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r' (?:xmlns(?::xlink)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{own}-", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return {"svg": Markup(svg.replace(plots.INK, "currentColor")), "caption": caption}


def _short(value):
    """Numbers as they are (the table writes them); texts and lists no longer than a cell should be."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(number, float) for number in value):
        value = ", ".join(f"{number:.4g}" for number in value) or "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]} ... ({len(text):,} characters)"


def _duration(receipt: dict) -> str:
    if not receipt:
        return ""
    ended, started = (datetime.fromisoformat(receipt[name]) for name in ("ended", "started"))
    return seconds_text((ended - started).total_seconds())


def _percent(value) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) and math.isfinite(value) else ""
