import pytest
import torch

from eagle3_helpers.params import TrainingParams
from eagle3_helpers.training.optimizer_step import Learner, lr_at
from tests.training.tiny import STEPS, tiny_document, tiny_draft, tiny_teacher

DOCUMENTS = [tiny_document("a", 12, 5), tiny_document("b", 7, 1), tiny_document("d", 15, 3)]


def learner(**settings) -> Learner:
    params = TrainingParams(compute_dtype="float32", ttt_steps=STEPS, lr=0.01, **settings)
    return Learner(tiny_draft(), tiny_teacher(), params, total=10)


@pytest.mark.parametrize(("total", "fraction"), [(10, 0.2), (7, 0.0), (200, 0.015), (1, 0.5), (3, 0.9)])
def test_the_learning_rate_reaches_its_peak_and_never_goes_above(total, fraction):
    rates = [lr_at(step, total, 1.0, fraction) for step in range(total)]
    assert max(rates) == 1.0
    assert all(0 < rate <= 1.0 for rate in rates)
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_learning_rates_and_weights_do_not_depend_on_micro_batches():
    whole, split = learner(micro_batch_tokens=8192), learner(micro_batch_tokens=12)
    records = [[one.step(number, DOCUMENTS).record for number in range(3)] for one in (whole, split)]
    assert [record["lr"] for record in records[0]] == [record["lr"] for record in records[1]]
    for ours, theirs in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["supervised"] == theirs["supervised"]


def test_training_lowers_the_loss_and_moves_only_what_trains():
    one = learner()
    embedding = one.draft.embed_tokens.weight.clone()
    losses = [one.step(number, DOCUMENTS).record["loss"] for number in range(10)]
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(one.draft.embed_tokens.weight, embedding)
    assert "embed_tokens.weight" not in one.trainable


def test_a_step_with_nan_changes_nothing_and_names_the_sample():
    one = learner()
    one.step(0, DOCUMENTS)
    before = {name: tensor.clone() for name, tensor in {**one.draft.state_dict(), **one.moments()}.items()}
    bad = tiny_document("bad", 9, 2)
    bad.last[4, 1] = float("inf")
    outcome = one.step(1, [*DOCUMENTS, bad])
    assert outcome.record is None
    assert outcome.suspects == ("bad",)
    after = {**one.draft.state_dict(), **one.moments()}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert one.step(2, DOCUMENTS).record is not None


def test_an_infinite_gradient_under_a_finite_loss_is_skipped_too():
    one = learner()
    one.draft.midlayer.mlp.up_proj.weight.register_hook(lambda grad: grad * float("inf"))
    outcome = one.step(0, DOCUMENTS)
    assert outcome.reason == "NaN or inf in the gradient"
    assert outcome.suspects == ("a", "b", "d")


def test_examining_changes_nothing_and_counts_like_training():
    one = learner()
    before = {name: tensor.clone() for name, tensor in one.draft.state_dict().items()}
    sums = one.examine(DOCUMENTS)
    record = one.step(0, DOCUMENTS).record
    assert sums.loss_per_step == pytest.approx(record["loss_per_step"], rel=1e-5)
    assert sums.accuracy_per_step == record["accuracy_per_step"]
    assert any(not torch.equal(one.draft.state_dict()[name], before[name]) for name in before)
    assert one.draft.training
