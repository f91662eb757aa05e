"""The trainer: `python -m eagle3_helpers.training.loop PLAN_JSON SHA256`, started outside the notebook and safe to kill.

Order of events: read the plan, refuse it unless SHA256 (what was approved) is that of its bytes, take the lock, check data
against the plan, build or resume, then for every optimizer step update -> metrics line -> held-out evaluation if due ->
checkpoint if due, and at the end result.json.

    process.json    who trains (pid, start time) and how it ended        metrics.jsonl   a line a step, a line an evaluation
    lock            held while a trainer lives                           events.jsonl    resumed, skipped, passed over, stopped ...
    checkpoints/    checkpoints.py                                       result.json     written last: the best checkpoint

Promises: stop and resume equals the straight run bit for bit on one device; SIGTERM ends with a checkpoint after the step it is in
(exit 143); `kill -9` loses at most the steps since the last checkpoint; no two trainers share a folder.
"""

import contextlib
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from eagle3_helpers.draft.freeze import apply_policy, frozen_digests
from eagle3_helpers.draft.model import DraftConfig
from eagle3_helpers.durable import append_lines, digest, file_digest, read_lines, write_json, write_text
from eagle3_helpers.errors import BadParams, CheckRefused, Refusal, StageFailed
from eagle3_helpers.runs import now
from eagle3_helpers.target import Target
from eagle3_helpers.training.batches import Order
from eagle3_helpers.training.checkpoints import Checkpoint, Checkpoints, damage, finished_result
from eagle3_helpers.training.corpus import Corpus
from eagle3_helpers.training.differences import differences, told
from eagle3_helpers.training.optimizer_step import Learner, Outcome
from eagle3_helpers.training.spec import TrainingSpec, read_spec, untrained_draft
from eagle3_helpers.training.step import Sums, Teacher
from eagle3_helpers.training.trainer_process import Stopped, only_trainer, stop_signals

LOG_SECONDS = 5


def new_learner(spec: TrainingSpec, corpus: Corpus) -> Learner:
    """A draft at its first weights with teacher and optimizer, on the spec's device. Nothing is written."""
    target, device = Target(spec.target), spec.training.device
    draft = untrained_draft(DraftConfig.from_dict(spec.draft), target, corpus.draft_vocab, spec.training.seed)
    dtype = getattr(torch, spec.training.compute_dtype)
    teacher = Teacher(target.head(), corpus.draft_vocab.d2t, dtype, device)
    return Learner(apply_policy(draft, spec.freeze_lm_head).to(device), teacher, spec.training, spec.optimizer_steps)


class Training:
    """One run of the loop over a spec, from nothing or from the newest checkpoint."""

    def __init__(self, spec: TrainingSpec, plan_digest: str):
        self.spec, self.plan_digest = spec, plan_digest
        self.folder = Path(spec.folder)
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.corpus = Corpus(spec)
        self.learner = new_learner(spec, self.corpus)
        self.frozen = frozen_digests(self.learner.draft)
        self.step, self.updates, self.skips, self.best = 0, 0, 0, None  # best: {"step", "value"}
        self.logged = 0.0

    def run(self, stop: list[int]) -> dict:
        """Trains to the end and returns the result. A signal number in `stop` ends it after the present step: Stopped."""
        self.resume()
        order = Order(self.corpus.train, self.spec.training.seed, self.spec.training.samples_per_step)
        steps = range(self.step, self.spec.optimizer_steps)
        with contextlib.closing(self.corpus.ahead(order.step(step)[2] for step in steps)) as ahead:
            for step in steps:
                if stop and step == steps.start:
                    raise Stopped(stop[0])
                outcome = self.learner.step(step, next(ahead))
                self.step = step + 1
                self.note(outcome, order.step(step)[0])
                improved = self.evaluate() if self.due(self.spec.training.evaluate_every) else False
                if stop or improved or self.due(self.spec.training.checkpoint_every):
                    self.save(order)
                if stop:
                    raise Stopped(stop[0])
        return self.finish()

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.spec.optimizer_steps

    def resume(self) -> None:
        """Takes up the newest whole checkpoint, says which it passed over, and cuts metrics back to it."""
        found, passed = self.checkpoints.newest()
        for folder, why in passed:
            aside = self.checkpoints.set_aside(folder)
            self.event("checkpoint passed over", checkpoint=folder.name, why=why, moved_to=str(aside))
        if found is None:
            self.event("started from the first weights", steps=self.spec.optimizer_steps)
            self.cut_metrics()
            return
        self.require_same_spec(found)
        state = found.state
        self.learner.draft.load_weights(found.weights(), embedding=self.learner.draft.embed_tokens.weight)
        self.learner.load_moments(found.moments())
        now_frozen = frozen_digests(self.learner.draft)
        changed = [name for name, before in state["frozen"].items() if now_frozen.get(name) != before]
        if changed:
            raise CheckRefused(
                f"frozen {', '.join(changed)} is not what training started with.", "Is the target the same?"
            )
        self.step, self.updates, self.skips = state["step"], state["updates"], state["skips"]
        self.best, self.frozen = state["best"], state["frozen"]
        self.cut_metrics()
        self.event("resumed", checkpoint=found.folder.name, step=self.step, steps=self.spec.optimizer_steps)

    def require_same_spec(self, found: Checkpoint) -> None:
        changes = differences(found.state["spec"], self.spec.model_dump(mode="json"))
        if changes:
            raise CheckRefused(
                f"{found.folder} belongs to another plan: {told(changes)}.",
                f"Move {self.folder} aside to train anew, or go back to the plan it was started with.",
            )

    def cut_metrics(self) -> None:
        """Steps after the checkpoint are done again, and must not be counted twice. From the first step on, all are moved aside."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        if self.step == 0:
            aside = path.with_name(f"metrics-aside-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.jsonl")
            os.rename(path, aside)
            self.event("metrics set aside", moved_to=aside.name)
        else:
            lines = path.read_text().splitlines(keepends=True)
            kept = sum(1 for record in read_lines(path) if record["step"] <= self.step)
            write_text(path, "".join(lines[:kept]))

    def note(self, outcome: Outcome, epoch: int) -> None:
        if outcome.record is not None:
            self.updates += 1
            self.metrics({"step": self.step, "epoch": epoch, **outcome.record})
            self.log(
                f"step {self.step}/{self.spec.optimizer_steps}  loss {outcome.record['loss']:.4f}  "
                f"{outcome.record['tokens_per_second']:,.0f} tok/s"
            )
            return
        self.skips += 1
        suspects = list(outcome.suspects)
        self.event("step skipped", step=self.step, reason=outcome.reason, samples=suspects, skips=self.skips)
        if self.skips > self.spec.training.max_skips:
            raise StageFailed(
                f"{outcome.reason} at step {self.step}, the {self.skips}th step that had to be skipped "
                f"(training.max_skips {self.spec.training.max_skips}); samples {', '.join(suspects[:8])}.",
                "Look at these samples' states (03_verify); if they are sound, lower training.lr.",
            )

    def evaluate(self) -> bool:
        """Held-out metrics; True where the simulated acceptance length is the best so far."""
        held_out = self.spec.held_out
        if not held_out:
            return False
        size, sums = self.spec.training.samples_per_step, Sums.zero(self.spec.training.ttt_steps)
        parts = [held_out[start : start + size] for start in range(0, len(held_out), size)]
        for documents in self.corpus.ahead(iter(parts)):
            sums += self.learner.examine(documents)
        value = sums.simulated_acceptance_length
        found = {
            "loss_per_step": sums.loss_per_step,
            "accuracy_per_step": sums.accuracy_per_step,
            "conditional_accuracy": sums.conditional_accuracy,
            "simulated_acceptance_length": value,
            "out_of_vocab": 1 - (sums.learned.sum() / sums.supervised.sum().clamp(min=1)).item(),
        }
        self.metrics({"step": self.step, "held_out": found}, durable=True)
        self.log(f"step {self.step}  held out: simulated acceptance length {value:.3f}", always=True)
        improved = self.best is None or value > self.best["value"]
        if improved:
            self.best = {"step": self.step, "value": value}
        return improved

    def save(self, order: Order) -> None:
        training, learner = self.spec.training, self.learner
        epoch, cursor, _ = order.step(self.step)
        state = {
            "step": self.step,
            "epoch": epoch,  # of the next step
            "cursor": cursor,  # samples of that epoch already used
            "updates": self.updates,
            "skips": self.skips,
            "best": self.best,
            "frozen": self.frozen,
            "plan_digest": self.plan_digest,
            "spec": self.spec.model_dump(mode="json"),
            "torch": torch.__version__,
            "time": now(),
        }
        saved = self.checkpoints.save(self.step, learner.draft.trained_weights(), learner.moments(), state)
        self.event("checkpoint written", checkpoint=saved.folder.name)
        gone = self.checkpoints.prune(training.keep_checkpoints, self.best and self.best["step"])
        if gone:
            self.event("checkpoints pruned", steps=gone)

    def finish(self) -> dict:
        """Writes result.json. Raises StageFailed where a frozen tensor changed, or no checkpoint is whole."""
        now_frozen = frozen_digests(self.learner.draft)
        changed = [name for name, before in self.frozen.items() if now_frozen[name] != before]
        if changed:
            raise StageFailed(
                f"frozen {', '.join(changed)} changed during training.",
                "Do not use these checkpoints; keep the folder.",
            )
        best = self.whole_best()
        chosen = self.checkpoints.path(best["step"])
        result = {
            "plan_digest": self.plan_digest,
            "checkpoint": f"checkpoints/{chosen.name}",
            "step": best["step"],
            "best_simulated_acceptance": best["value"],
            "frozen_unchanged": True,
            "frozen": self.frozen,
            "updates": self.updates,
            "skips": self.skips,
            "spec_digest": self.spec.digest,
            "draft_digest": file_digest(chosen / "draft.safetensors"),
            "finished": now(),
        }
        write_json(self.folder / "result.json", result)
        self.event("finished", **{name: result[name] for name in ("checkpoint", "best_simulated_acceptance")})
        return result

    def whole_best(self) -> dict:
        """Step and value of the best checkpoint; where that was damaged since, of the newest whole one, and an event says so."""
        best = self.best or {"step": self.step, "value": None}
        folder = self.checkpoints.path(best["step"])
        wrong = damage(folder)
        if not wrong:
            return best
        newest, _ = self.checkpoints.newest()
        if newest is None:
            raise StageFailed(
                f"no checkpoint is whole, {folder.name}: {wrong}.",
                "Check that volume, then launch again: training starts anew.",
            )
        self.event("best checkpoint damaged", checkpoint=folder.name, why=wrong, taken_instead=newest.folder.name)
        values = [
            record["held_out"]["simulated_acceptance_length"]
            for record in read_lines(self.folder / "metrics.jsonl")
            if "held_out" in record and record["step"] == newest.step
        ]
        return {"step": newest.step, "value": values[-1] if values else None}

    def metrics(self, record: dict, durable: bool = False) -> None:
        append_lines(self.folder / "metrics.jsonl", [record], durable=durable)

    def event(self, kind: str, **fields) -> None:
        append_lines(self.folder / "events.jsonl", [{"time": now(), "kind": kind, "pid": os.getpid(), **fields}])
        self.log(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items()), always=True)

    def log(self, text: str, always: bool = False) -> None:
        if always or time.monotonic() - self.logged > LOG_SECONDS:
            self.logged = time.monotonic()
            print(f"{now()[:19]}  {text}", flush=True)


def read_approved_plan(path: Path, approved: str) -> dict:
    """The plan whose bytes have the sha256 that was approved.

    Raises BadParams where the file holds no plan, CheckRefused where it holds another one.
    """
    try:
        content = path.read_bytes()
        plan = json.loads(content)
    except (OSError, ValueError):
        plan = None
    if not isinstance(plan, dict):
        raise BadParams(f"{path} holds no plan.", "Notebook 04 writes plan.json.")
    if digest(content) != approved:
        raise CheckRefused(
            f"{path} holds plan {digest(content)}, and {approved} was approved.",
            "Nothing was trained. Run 05_train again: it asks for an approval of the present plan.",
        )
    return plan


def main(arguments: list[str]) -> int:
    """The exit code: 0 finished, 143 or 130 stopped by a signal, else the refusal's."""
    try:
        if len(arguments) != 2:
            raise BadParams(
                "the trainer takes two arguments.", "python -m eagle3_helpers.training.loop PLAN_JSON SHA256"
            )
        path, plan_digest = arguments
        spec = read_spec(read_approved_plan(Path(path), plan_digest))
        folder = Path(spec.folder)
        with stop_signals() as stop, only_trainer(folder, plan_digest):
            done = finished_result(folder, spec.digest)
            if done:
                print(f"nothing to do: finished {done['finished']}, {done['checkpoint']}", flush=True)
            else:
                Training(spec, plan_digest).run(stop)
        return 0
    except Stopped as stopped:
        print(f"stopped by {stopped}; every step that was done is in a checkpoint", flush=True)
        return 128 + stopped.number
    except Refusal as refusal:
        print("\n".join(refusal._render_traceback_()), file=sys.stderr, flush=True)
        return refusal.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
