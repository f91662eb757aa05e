"""What training will cost and whether it is sound, measured on real rows before anyone approves it. No file is changed."""

import resource
import statistics
import time
from collections.abc import Callable

import torch

from eagle3_helpers.display import Checks
from eagle3_helpers.draft.freeze import certify
from eagle3_helpers.draft.model import Draft
from eagle3_helpers.training.batches import Order, micro_batches
from eagle3_helpers.training.corpus import Corpus
from eagle3_helpers.training.loop import new_learner
from eagle3_helpers.training.optimizer_step import Learner
from eagle3_helpers.training.spec import TrainingSpec
from eagle3_helpers.training.step import grade, row_weights, set_exam


def certify_on_data(spec: TrainingSpec) -> Checks:
    """The freeze certificate, on the rows of the first optimizer step (its first micro-batch)."""
    learner, _, load = _beginning(spec)
    documents = load(0)
    return certify(learner.draft, lambda draft: _backward(draft, learner, documents))


def measure(spec: TrainingSpec, steps: int = 3) -> dict:
    """Times `steps` optimizer steps after one that is not timed.

    seconds_per_step is the median, reading included; peak_bytes is of the GPU, on the CPU of this whole process.
    """
    learner, device, load = _beginning(spec)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, tokens = [], []
    for number in range(steps + 1):
        began = time.perf_counter()
        documents = load(number)
        learner.step(number, documents)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        tokens.append(sum(len(document.input_ids) for document in documents))
    return {
        "seconds_per_step": statistics.median(seconds[1:]),
        "tokens_per_step": statistics.mean(tokens[1:]),
        "tokens_per_second": sum(tokens[1:]) / sum(seconds[1:]),
        "peak_bytes": _peak_bytes(device),
        "steps": steps,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


def _beginning(spec: TrainingSpec) -> tuple[Learner, torch.device, Callable[[int], list]]:
    """A learner at its first weights, its device, and what reads the documents of an optimizer step."""
    corpus = Corpus(spec)
    order = Order(corpus.train, spec.training.seed, spec.training.samples_per_step)
    learner = new_learner(spec, corpus)
    return learner, learner.teacher.device, lambda number: corpus.load(order.step(number % spec.optimizer_steps)[2])


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
