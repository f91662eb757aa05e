"""What training will cost and whether it is sound, measured on real rows before anyone approves it. It leaves no file behind."""

import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from eagle3_helpers.display import Checks
from eagle3_helpers.draft.freeze import certify
from eagle3_helpers.draft.model import Draft
from eagle3_helpers.training.batches import Order, micro_batches
from eagle3_helpers.training.checkpoints import Checkpoints
from eagle3_helpers.training.corpus import Corpus
from eagle3_helpers.training.loop import new_learner
from eagle3_helpers.training.optimizer_step import Learner
from eagle3_helpers.training.spec import TrainingSpec
from eagle3_helpers.training.step import grade, row_weights, set_exam


def certify_on_data(spec: TrainingSpec) -> Checks:
    """The freeze certificate, on the rows of the first optimizer step (its first micro-batch)."""
    corpus = Corpus(spec)
    learner = new_learner(spec, corpus)
    documents = corpus.load(_samples_of(spec, corpus, 0))
    return certify(learner.draft, lambda draft: _backward(draft, learner, documents))


def measure(spec: TrainingSpec, steps: int = 3) -> dict:
    """Times `steps` optimizer steps after one that is not timed, a held-out evaluation, and a checkpoint.

    seconds_per_step is the median, reading included; seconds_per_evaluation is taken from one step's worth of the held-out
    samples. The checkpoint is a real one, in a temporary folder beside the training folder, and is removed again.
    peak_bytes is of the GPU, on the CPU of this whole process.
    """
    corpus = Corpus(spec)
    learner = new_learner(spec, corpus)
    device = learner.teacher.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, tokens = [], []
    for number in range(steps + 1):
        began = time.perf_counter()
        documents = corpus.load(_samples_of(spec, corpus, number))
        learner.step(number, documents)
        seconds.append(_since(began, device))
        tokens.append(sum(len(document.input_ids) for document in documents))
    return {
        "seconds_per_step": statistics.median(seconds[1:]),
        "seconds_per_evaluation": _evaluation_seconds(spec, corpus, learner),
        "seconds_per_checkpoint": _checkpoint_seconds(spec, learner),
        "tokens_per_step": statistics.mean(tokens[1:]),
        "tokens_per_second": sum(tokens[1:]) / sum(seconds[1:]),
        "peak_bytes": _peak_bytes(device),
        "steps": steps,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


def _samples_of(spec: TrainingSpec, corpus: Corpus, number: int) -> list[str]:
    """Samples of an optimizer step; after the last one the first follows."""
    order = Order(corpus.train, spec.training.seed, spec.training.samples_per_step)
    return order.step(number % spec.optimizer_steps)[2]


def _evaluation_seconds(spec: TrainingSpec, corpus: Corpus, learner: Learner) -> float:
    part = spec.held_out[: spec.training.samples_per_step]
    if not part:
        return 0.0
    began = time.perf_counter()
    learner.examine(corpus.load(part))
    return _since(began, learner.teacher.device) * len(spec.held_out) / len(part)


def _checkpoint_seconds(spec: TrainingSpec, learner: Learner) -> float:
    beside = Path(spec.folder).parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".warm-up-", dir=beside) as folder:
        began = time.perf_counter()
        Checkpoints(Path(folder)).save(0, learner.draft.trained_weights(), learner.moments(), {})
        return time.perf_counter() - began


def _since(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _backward(draft: Draft, learner: Learner, documents: list) -> None:
    settings = learner.params
    batch = micro_batches(documents, settings.micro_batch_tokens)[0]
    exam = set_exam(batch, learner.teacher, settings.ttt_steps)
    weights = row_weights(exam.learned, exam.learned.sum(1), settings.step_decay)
    with learner.autocast():
        result = grade(draft, exam, learner.teacher, weights)
    result.total.backward()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
