"""The one-file report, from run folders in every state: empty, whole, in the middle of a story, and damaged."""

import json
from html.parser import HTMLParser

import pytest

from eagle3_helpers.draft.freeze import FreezeTable, Row
from eagle3_helpers.durable import append_lines, canonical_json, digest, file_digest, write_bytes, write_json
from eagle3_helpers.params import Params
from eagle3_helpers.report.evidence import STORY
from eagle3_helpers.report.page import build_report
from eagle3_helpers.report.sections import SECTIONS
from eagle3_helpers.runs import Run
from tests.makers import params_values, write_jsonl

VOID = {"meta", "br", "link", "img", "input", "hr"}
ATTACK = "<script>alert('x')</script><img src=http://evil.example/x.png>"


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, words outside of style, and whether every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.words, self.open, self.sections, self.stray = [], "", [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "section":
            self.sections[dict(attributes)["id"]] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.stray.append(tag)

    def handle_data(self, words):
        if "style" in self.open:
            return
        words = f"{words} " if self.open and self.open[-1] in ("td", "th", "span") else words
        self.words += words
        if "section" in self.open:
            name = list(self.sections)[-1]
            self.sections[name] += words

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


def read(run: Run) -> Page:
    return Page(build_report(run).read_text(encoding="utf-8"))


def empty_run(home) -> Run:
    params = Params.model_validate(params_values(home))
    (home / "outputs" / "tiny").mkdir(parents=True)
    return Run(home / "outputs" / "tiny", params)


def make_run(home, reason: str = "numbers checked", category: str = "writing") -> Run:
    """A run with all six stages done, its files as the stages write them."""
    run = empty_run(home)
    folder = run.folder
    run.write_params()
    finding = {
        "sample_id": "a" * 16,
        "kind": "corrupt",
        "detail": "cut at byte 12,000",
        "path": "states/aa",
        "bytes": 9,
    }
    checkpoint = {"name": "step-000020", "complete": False, "why": "no marker"}
    recovery = {"interrupted": ["02_extract-1"], "states": {"ok": 120}, "findings": [finding]}
    write_json(folder / "recovery.json", {**recovery, "checkpoints": [checkpoint]})
    counts = {"survived": 120, "missing": 180, "adopted": 2, "quarantined": 1, "interrupted": ["02_extract-1"]}
    _receipt(run, "01_recover", {}, ["recovery.json"], **counts)
    table = home / "data" / "samples" / "0123456789abcdef"
    lengths = [40 + 7 * n % 160 for n in range(300)]
    write_jsonl(table / "samples.jsonl", [{"sample_id": f"{n:016x}", "n_tokens": k} for n, k in enumerate(lengths)])
    rejected = {"no assistant turn": 6, "not JSON": 2}
    account = {"read": 312, "accepted": 300, "rejected": rejected, "repaired": {"leading turn dropped": 1}}
    account |= {"duplicates": 4, "rejected_lines": {"no assistant turn": [3, 9], "not JSON": [7, 8]}}
    write_json(table / "accounting.json", {"fingerprint": table.name, "digest": "d" * 64, "accounting": account})
    write_json(folder / "samples.json", {"folder": str(table), "samples": 300})
    captured = {"samples": 180, "tokens": 21_000, "bytes": 5_400_000, "seconds": 9.5}
    counts = {"samples": account, "tokens": sum(lengths), "supervised": 9_000, "coverage": 0.95}
    _receipt(run, "02_extract", {}, ["samples.json"], stored_before=120, stored_now=180, captured=captured, **counts)
    checks = [_check("checksum mismatch", True, 0, 0), _check("samples that may be trained on", True, 300, 300)]
    norms = {
        slot: {"mean": k + 2.0, "p1": k + 0.5, "p50": k + 2.0, "p99": k + 9.0} for k, slot in enumerate(["h_2", "last"])
    }
    totals = {"samples": 300, "tokens": sum(lengths), "bytes": 9_000_000, "seconds": 0.4}
    verification = {"checks": checks, "totals": totals, "norms": norms, "findings": [], "manifest_digest": "e" * 64}
    slots = {"h_2": {"below": 0.7, "own": 1.0, "above": 0.6, "relative_error": 0.0}}
    slots["last"] = {"below": 0.3, "own": 1.0, "above": None, "relative_error": 0.0}
    verification["alignment"] = {"samples": 8, "tokens": 900, "head_agreement": 1.0, "slots": slots}
    write_json(folder / "verification.json", verification)
    _receipt(run, "03_verify", {}, ["verification.json"], files=300, bytes=9_000_000)
    rows = [
        Row("embedding", "embed_tokens.weight", [384, 32], 12_288, "float32", False, False, "target", reason),
        Row("fusion", "fc.weight", [32, 96], 3_072, "float32", True, True, "random", "the draft's own"),
    ]
    FreezeTable(rows).save(folder)
    write_bytes(folder / "plan.json", canonical_json(_plan(run)))
    _receipt(run, "04_inspect_freeze", {"verification.json": _file(run, "verification.json")}, ["plan.json"])
    approval = {"decision": "approved", "approver": "Ada", "time": "2026-12-01T10:00:00.000000+00:00", "reason": reason}
    approval |= {"plan_sha256": file_digest(folder / "plan.json"), "redeemed_at": "2026-12-01T10:01:00.000+00:00"}
    write_json(folder / "approval.json", approval)
    append_lines(
        folder / "approvals.jsonl", [{**approval, "decision": "rejected", "reason": "GPU 3 was busy"}, approval]
    )
    append_lines(folder / "training" / "metrics.jsonl", metrics(60))
    result = {"plan_digest": approval["plan_sha256"], "checkpoint": "checkpoints/step-000060", "step": 60}
    result |= {"best_simulated_acceptance": 1.9, "frozen_unchanged": True, "finished": True, "draft_digest": "f" * 64}
    write_json(folder / "training" / "result.json", result)
    _receipt(run, "05_train", {"plan.json": _file(run, "plan.json")}, ["training/result.json"])
    parts = {"math": (2.1, [1.9, 2.3]), category: (1.6, [1.5, 1.75]), "silent": (None, None)}
    summary = {
        "verdict": "draft used",
        "acceptance_length": 1.87,
        "acceptance_interval": [1.8, 1.95],
        "acceptance_length_untrained": 1.02,
        "acceptance_length_bigram": 1.31,
        "per_position": [0.52, 0.25, 0.1],
        "n_prompts": 48,
        "lossless_mismatches": 0,
        "per_category": {
            name: {"n_prompts": 16, "acceptance_length": value, "acceptance_interval": interval}
            for name, (value, interval) in parts.items()
        },
        "mismatches": [],
        "ties": [{"prompt": "81", "place": 12, "gap": 0.02}],
        "tokens": 3072,
        "steps": 1643,
    }
    write_json(folder / "evaluation" / "summary.json", summary)
    _receipt(
        run, "06_evaluate", {"training/result.json": _file(run, "training/result.json")}, ["evaluation/summary.json"]
    )
    return run


def metrics(steps: int) -> list[dict]:
    records = []
    for step in range(1, steps + 1):
        right = [0.5 * step / steps - 0.05 * ttt + 0.12 for ttt in range(3)]
        record = {"step": step, "epoch": 0, "loss": 3.0, "loss_per_step": [5.0 - value for value in right]}
        record |= {"accuracy_per_step": right, "lr": 0.001, "grad_norm": 0.4, "tokens": 800, "supervised": 300}
        records.append({**record, "seconds": 0.2, "tokens_per_second": 4000.0 + step})
        if step % 20 == 0:
            held_out = {"loss_per_step": [5.1 - value for value in right], "accuracy_per_step": right}
            held_out |= {"conditional_accuracy": [0.5, 0.6, 0.4], "simulated_acceptance_length": 1.92}
            records.append({"step": step, "held_out": held_out})
    return records


def _file(run: Run, name: str) -> str:
    return file_digest(run.folder / name)


def _check(name: str, ok: bool, observed, expected, remedy: str = "") -> dict:
    return {"check": name, "expected": str(expected), "observed": str(observed), "ok": ok, "remedy": remedy}


def _receipt(run: Run, stage: str, inputs: dict, made: list[str], **results) -> None:
    attempt = f"{stage}-1"
    run.event("stage started", stage=stage, attempt=attempt, pid_started=1.0)
    for name in made:
        if not (run.folder / name).exists():
            write_json(run.folder / name, {"made by": stage})
    outputs = {name: _file(run, name) for name in made}
    checks = [_check(f"{stage} check", True, 3, 3)]
    receipt = run.write_receipt(
        stage,
        started="2026-12-01T09:00:00.000+00:00",
        inputs={"params": digest(stage), **inputs},
        outputs=outputs,
        checks=checks,
        results=results,
    )
    run.event("stage done", stage=stage, attempt=attempt, receipt=receipt["digest"], unchanged=False)


def _plan(run: Run) -> dict:
    spec = {"target": {"path": "models/target"}, "store": "data/tiny", "held_out": ["0" * 16], "optimizer_steps": 60}
    spec |= {"steps_per_epoch": 30, "training": run.params.values("training")["training"]}
    return {
        "run_id": run.id,
        "argv": ["python", "-m", "eagle3_helpers.training.loop", "plan.json"],
        "environment": [],
        "device": "cpu",
        "gpus": [],
        "code": {"commit": "a" * 40, "dirty": False},
        "versions": {"torch": "2.13.0"},
        "data": {"capture_record": "c" * 64, "samples": 300, "tokens": 30_000, "bytes": 9_000_000},
        "freeze_table": {"digest": "b" * 64, "trainable": 3_072, "frozen": 12_288},
        "spec": spec,
        "estimate": {
            "evaluations": 2,
            "checkpoints": 3,
            "seconds": 12.0,
            "hours": 0.0033,
            "gpu_hours": 0.0,
            "kwh": 0.0,
            "cost": 0.0,
            "from": {"seconds_per_step": 0.2, "seconds_per_evaluation": 0.5, "seconds_per_checkpoint": 0.1},
        },
        "disk": {"needed": 1_000_000, "free": 9_000_000_000},
        "checkpoints": "training/checkpoints",
        "stop_rules": ["more than 3 steps with a NaN"],
        "undo": "Move the training folder away.",
        "created": "2026-12-01T09:59:00.000+00:00",
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Page:
    return read(make_run(tmp_path_factory.mktemp("whole")))


def test_a_whole_run_says_what_was_achieved_and_shows_every_part(whole):
    page = whole
    assert "Acceptance length 1.87 [1.80, 1.95] on 48 prompts; a bigram table gives 1.31" in page.words
    assert "not done yet" not in page.words and "damaged file" not in page.words and "STOP" not in page.words
    assert (
        "cut off by a crash: 02_extract-1. 120 samples had survived; files moved to quarantine: 1, adopted: 2."
        in page.words
    )
    assert "Already stored: 120 samples. Extracted then: 180." in page.words
    assert "covers 95.00% of them" in page.words
    assert "read 312 = accepted 300 + rejected 8 + duplicates 4" in page.words
    assert "approved" in page.sections["stages"] and "by Ada" in page.sections["plan-and-approval"]
    assert "GPU 3 was busy" in page.sections["plan-and-approval"]
    assert "12,288" in page.sections["what-trains-what-is-frozen"]
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 7
    assert len(page.sections) == len(SECTIONS)


def test_every_stage_of_the_package_is_in_the_story():
    from eagle3_helpers.stages import STAGES

    assert tuple(stage.name for stage in STAGES) == STORY


def test_accuracy_stands_beside_acceptance_as_the_same_quantity(whole):
    words = " ".join(whole.sections["evaluation"].split())
    assert "right up to here" in words
    assert "2 57.0% 30.0% 25.0%" in words  # held out alone, 0.5 x 0.6, measured


def test_the_page_is_one_well_formed_file_that_loads_and_runs_nothing(whole):
    page = whole
    assert not page.open and not page.stray
    assert len(page.ids) == len(set(page.ids))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#") and value[1:] in page.ids, (tag, name, value)
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_texts_out_of_files_are_words_and_never_markup(tmp_path):
    run = make_run(tmp_path, reason=ATTACK, category=ATTACK)
    run.event("stage failed", stage="06_evaluate", attempt="06_evaluate-2", error=ATTACK)
    page = read(run)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    for section in ("what-trains-what-is-frozen", "plan-and-approval", "evaluation", "last-events", "recovery"):
        assert ATTACK in page.sections[section], section


def test_equal_files_give_the_same_bytes(tmp_path):
    run = make_run(tmp_path)
    first = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == first


def test_an_empty_run_folder_has_a_report(tmp_path):
    page = read(empty_run(tmp_path))
    assert "Acceptance not measured yet. Next: 01_recover." in page.words
    for anchor, words in page.sections.items():
        if anchor != "stages":
            assert "not done yet" in words, anchor


def test_a_run_that_waits_for_approval_says_so(tmp_path):
    run = make_run(tmp_path)
    for name in ("approval.json", "receipts/05_train.json", "receipts/06_evaluate.json", "evaluation/summary.json"):
        (run.folder / name).unlink()
    page = read(run)
    assert "Next: 05_train" in page.words
    assert "Approval: waiting, no decision on the plan." in page.words


def test_an_approval_of_another_plan_is_shown_as_void(tmp_path):
    run = make_run(tmp_path)
    plan = json.loads((run.folder / "plan.json").read_bytes())
    write_bytes(run.folder / "plan.json", canonical_json({**plan, "undo": "nothing"}))
    page = read(run)
    assert "Approval: void, another plan was approved by Ada" in page.words
    assert "changed since: plan.json" in page.sections["stages"]


def test_a_changed_answer_and_a_changed_frozen_weight_are_stops(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run.folder / "evaluation/summary.json").read_bytes())
    write_json(
        run.folder / "evaluation/summary.json", {**summary, "lossless_mismatches": 2, "verdict": "answers differ"}
    )
    result = json.loads((run.folder / "training/result.json").read_bytes())
    write_json(run.folder / "training/result.json", {**result, "frozen_unchanged": False})
    page = read(run)
    assert "STOP 2 of 48 answers differ beyond numerical ties" in " ".join(page.words.split())
    assert "STOP frozen weights changed" in " ".join(page.words.split())


def test_an_interval_that_reaches_the_bigram_table_is_no_success(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run.folder / "evaluation/summary.json").read_bytes())
    write_json(run.folder / "evaluation/summary.json", {**summary, "acceptance_length_bigram": 1.85})
    assert "STOP the interval does not lie above both" in " ".join(read(run).words.split())


def test_an_edited_receipt_is_named_and_does_not_count(tmp_path):
    run = make_run(tmp_path)
    path = run.receipt_file("03_verify")
    path.write_text(path.read_text().replace('"files": 300', '"files": 301'))
    page = read(run)
    assert "receipts/03_verify.json" in page.words and "its digest is not that of its content" in page.words
    assert "its receipt cannot be used" in page.sections["stages"]


def test_a_stage_that_began_and_has_no_receipt_is_unfinished_and_a_failed_one_has_its_error(tmp_path):
    run = empty_run(tmp_path)
    run.event("stage started", stage="01_recover", attempt="01_recover-1", pid_started=1.0)
    run.event("stage failed", stage="01_recover", attempt="01_recover-1", error="CheckRefused: GPU 3 is held by vllm")
    run.event("stage started", stage="02_extract", attempt="02_extract-1", pid_started=1.0)
    stages = read(run).sections["stages"]
    assert "GPU 3 is held by vllm" in stages
    assert "attempt 02_extract-1 began and has no receipt" in stages


CUT = (
    ("samples.json", "verification.json"),
    ("freeze_table.json", "training/metrics.jsonl", "params.yaml"),
    ("plan.json", "approvals.jsonl", "receipts/02_extract.json"),
    ("approval.json", "training/result.json"),
    ("evaluation/summary.json", "events.jsonl"),
)


@pytest.mark.parametrize("names", CUT, ids=" ".join)
def test_a_report_comes_out_when_files_are_cut_in_half(tmp_path, names):
    run = make_run(tmp_path)
    for name in names:
        path = run.folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    page = read(run)
    assert not page.open and not page.stray
    assert len(page.sections) == len(SECTIONS)


@pytest.mark.parametrize("content", [b"", b"[1, 2]\n", b"\xff\x00\n"])
def test_a_report_comes_out_when_no_file_holds_what_it_should(tmp_path, content):
    run = make_run(tmp_path)
    for path in run.folder.rglob("*.*"):
        path.write_bytes(content)
    page = read(run)
    assert not page.open and not page.stray
    assert all("not done yet" in words for anchor, words in page.sections.items() if anchor != "stages")


def test_a_report_comes_out_when_every_value_is_of_another_kind(tmp_path):
    run = make_run(tmp_path)
    for path in run.folder.rglob("*.*"):
        path.write_text(
            '{"checks": 7, "folder": 3, "verdict": {}, "step": "x", "held_out": 1, "time": [], "decision": 5}\n'
        )
    page = read(run)
    assert not page.open and not page.stray
    assert len(page.sections) == len(SECTIONS)


def test_damage_is_named_with_its_place_and_the_rest_is_used(tmp_path):
    run = make_run(tmp_path)
    path = run.folder / "training" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{torn\n", *lines[3:]]))
    (run.folder / "evaluation" / "summary.json").write_text("{")
    page = read(run)
    assert "training/metrics.jsonl" in page.words and "line 4" in page.words
    assert "simulated_acceptance_length" in page.sections["training"]
    assert "not done yet: evaluation/summary.json is damaged" in page.sections["evaluation"]
