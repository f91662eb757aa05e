"""One optimizer step: micro-batches, one mean over all their rows, clipping, AdamW, and a cosine that counts optimizer steps.

Weights, gradients and moments are float32; products run in bfloat16 where the params say so. Nothing here is random, so equal weights
and equal samples make equal steps. A step whose loss or gradient holds NaN or inf changes no weight and no moment.
"""

import dataclasses
import math
import time

import torch

from eagle3_helpers.draft.model import Draft
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.params import TrainingParams
from eagle3_helpers.training.batches import Document, micro_batches
from eagle3_helpers.training.step import Sums, Teacher, grade, row_weights, set_exam

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_at(step: int, total: int, peak: float, warmup_fraction: float) -> float:
    """Learning rate of optimizer step `step`, 0 .. total-1: a line up to the peak, then half a cosine; never above the peak."""
    warmup = round(warmup_fraction * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`record` is the line for metrics.jsonl without step and epoch, None where the step was skipped for `reason`."""

    record: dict | None
    reason: str = ""
    suspects: tuple[str, ...] = ()  # samples whose own loss is not finite, else all of the step


class Learner:
    """A draft, its teacher and its optimizer. `total` is the number of optimizer steps that the cosine spans."""

    def __init__(self, draft: Draft, teacher: Teacher, params: TrainingParams, total: int):
        self.draft, self.teacher, self.params, self.total = draft, teacher, params, total
        self.trainable = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=params.lr,
            betas=tuple(params.betas),
            weight_decay=params.weight_decay,
            fused=True,
        )
        for weight in self.trainable.values():  # there from the start, so that a checkpoint has one form
            self.optimizer.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                **{name: torch.zeros_like(weight) for name in MOMENTS},
            }

    def step(self, number: int, documents: list[Document]) -> Outcome:
        """Optimizer step `number`, counted from 0."""
        began = time.perf_counter()
        settings = self.params
        exams = [
            set_exam(batch, self.teacher, settings.ttt_steps)
            for batch in micro_batches(documents, settings.micro_batch_tokens)
        ]
        counts = torch.stack([exam.learned.sum(1) for exam in exams]).sum(0)
        sums, loss = Sums.zero(settings.ttt_steps), 0.0
        for exam in exams:
            with self.autocast():
                result = grade(self.draft, exam, self.teacher, row_weights(exam.learned, counts, settings.step_decay))
            if not result.total.isfinite():
                return self._skip("loss", documents, result.not_finite)
            result.total.backward()
            sums, loss = sums + result.sums, loss + result.total.item()
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), settings.clip_norm).item()
        if not math.isfinite(norm):
            return self._skip("gradient", documents, [])
        lr = lr_at(number, self.total, settings.lr, settings.warmup_fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = sum(len(document.input_ids) for document in documents)
        seconds = time.perf_counter() - began
        return Outcome(
            {
                "loss": loss,
                "loss_per_step": sums.loss_per_step,
                "accuracy_per_step": sums.accuracy_per_step,
                "lr": lr,
                "grad_norm": norm,
                "tokens": tokens,
                "supervised": int(sums.supervised[0]),
                "out_of_vocab": int(sums.supervised[0] - sums.learned[0]),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
        )

    @torch.no_grad()
    def examine(self, documents: list[Document]) -> Sums:
        """Losses and counts on documents that are not trained on. Raises StageFailed naming those that give NaN or inf."""
        sums = Sums.zero(self.params.ttt_steps)
        for batch in micro_batches(documents, self.params.micro_batch_tokens):
            exam = set_exam(batch, self.teacher, self.params.ttt_steps)
            with self.autocast():
                result = grade(self.draft, exam, self.teacher, row_weights(exam.learned, exam.learned.sum(1), 1.0))
            if result.not_finite:
                raise StageFailed(
                    f"NaN or inf on held-out samples {', '.join(result.not_finite[:8])}.",
                    "Look at these samples' states (03_verify); if they are sound, lower training.lr.",
                )
            sums += result.sums
        return sums

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by "<weight>.exp_avg", "<weight>.exp_avg_sq" and "<weight>.step", all float32."""
        return {
            f"{name}.{kind}": tensor
            for name, weight in self.trainable.items()
            for kind, tensor in self.optimizer.state[weight].items()
        }

    def load_moments(self, moments: dict[str, torch.Tensor]) -> None:
        for name, own in self.moments().items():
            own.copy_(moments[name])

    def _skip(self, what: str, documents: list[Document], suspects: list[str]) -> Outcome:
        self.optimizer.zero_grad()
        names = suspects or [document.sample_id for document in documents]
        return Outcome(None, f"NaN or inf in the {what}", tuple(names))

    def autocast(self):
        enabled = self.params.compute_dtype == "bfloat16"
        return torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=enabled)
