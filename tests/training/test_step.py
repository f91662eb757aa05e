import pytest
import torch

from eagle3_helpers.training.batches import Document, micro_batches
from eagle3_helpers.training.step import OUTSIDE, Sums, grade, row_weights, set_exam
from tests.training.tiny import D2T, STEPS, VOCAB, graded, gradients, tiny_document, tiny_draft, tiny_teacher

DOCUMENTS = [tiny_document("a", 12, 5), tiny_document("b", 7, 1), tiny_document("c", 9, 9), tiny_document("d", 15, 3)]


def test_a_document_has_the_same_loss_alone_and_packed_with_others():
    draft = tiny_draft()
    alone = Sums.zero(STEPS)
    for document in DOCUMENTS:
        alone += graded(draft, [document]).sums
    packed = graded(draft, DOCUMENTS).sums
    assert torch.allclose(packed.loss, alone.loss, rtol=1e-6)
    for name in ("learned", "supervised", "correct", "chains", "chains_correct"):
        assert torch.equal(getattr(packed, name), getattr(alone, name)), name


@pytest.mark.parametrize("max_rows", [1, 20, 1000])
def test_accumulation_over_micro_batches_changes_neither_loss_nor_gradient(max_rows):
    teacher = tiny_teacher()
    whole, split = tiny_draft(), tiny_draft()
    expected = graded(whole, DOCUMENTS)
    expected.total.backward()
    exams = [set_exam(batch, teacher, STEPS) for batch in micro_batches(DOCUMENTS, max_rows)]
    counts = sum(exam.learned.sum(1) for exam in exams)
    total = 0.0
    for exam in exams:
        part = grade(split, exam, teacher, row_weights(exam.learned, counts, 0.8))
        part.total.backward()
        total += part.total.item()
    assert total == pytest.approx(expected.total.item(), rel=1e-6)
    for name, grad in gradients(whole).items():
        assert torch.allclose(gradients(split)[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max()), name


def test_the_row_before_the_answer_is_trained_and_the_one_before_it_is_not():
    """At step 0 (one step only): row T-1 is fed the first answer token and has gradient; row T-2 is fed prompt."""
    prompt = 5
    document = tiny_document("a", 12, prompt)
    exam = set_exam(micro_batches([document], 100)[0], tiny_teacher(), STEPS)
    assert exam.supervised[0].nonzero().squeeze(1).tolist() == list(range(prompt - 1, 11))
    assert exam.supervised[1].nonzero().squeeze(1).tolist() == list(range(prompt - 2, 10))
    assert exam.supervised[2].nonzero().squeeze(1).tolist() == list(range(prompt - 3, 9))
    first = Document("a", document.input_ids, (torch.arange(12) == prompt).to(torch.uint8), document.aux, document.last)
    exam = set_exam(micro_batches([first], 100)[0], tiny_teacher(), 1)
    assert exam.supervised.nonzero().tolist() == [[0, prompt - 1]]


def test_the_first_answer_token_moves_the_loss_and_states_past_the_last_row_do_not():
    draft, document = tiny_draft(), tiny_document("a", 12, 5)
    loss = graded(draft, [document]).total.item()

    def changed(field: str, place: int) -> bool:
        tensor = getattr(document, field).clone()
        tensor[place] = (tensor[place] + 1) % VOCAB if field == "input_ids" else tensor[place] + 1
        values = {**document.__dict__, field: tensor}
        return graded(draft, [Document(**values)]).total.item() != loss

    assert changed("input_ids", 5)  # fed to row 4
    assert not changed("input_ids", 0)  # x_0 is fed to no row
    assert changed("aux", 0)  # a key of every later row
    assert not changed("aux", 11)  # the last token has no next one to be fed
    assert not changed("last", 4)  # y_4 is asked of rows fed x_4, which is prompt
    assert changed("last", 5)
    assert changed("last", 11)


def test_a_document_never_sees_its_neighbour():
    draft, document = tiny_draft(), tiny_document("a", 12, 0)
    neighbours = [
        tiny_document("b", 9, 9, seed=seed) for seed in (1, 2)
    ]  # unsupervised, so they have no loss of their own
    losses = [graded(draft, order).sums.loss.tolist() for n in neighbours for order in ([document, n], [n, document])]
    assert all(loss == pytest.approx(losses[0], rel=1e-6) for loss in losses)


def test_rows_whose_target_token_is_outside_the_draft_vocabulary_are_counted_but_not_learned():
    teacher, document = tiny_teacher(), tiny_document("a", 40, 0)
    choice = (document.last[1:] @ teacher.head_VH.T).argmax(-1)  # of the target's whole vocabulary
    inside = torch.isin(choice, D2T + torch.arange(len(D2T)))
    assert inside.any() and not inside.all()
    exam = set_exam(micro_batches([document], 100)[0], teacher, STEPS)
    assert ((exam.truth != OUTSIDE) == inside).all()
    sums = graded(tiny_draft(), [document]).sums
    assert sums.learned.tolist() == [inside[i:].sum() for i in range(STEPS)]
    assert sums.supervised.tolist() == [39, 38, 37]


def test_the_acceptance_length_counts_only_unbroken_chains_and_the_bonus_token():
    sums = Sums.zero(3)
    sums.chains += torch.tensor([10, 6, 3])
    sums.chains_correct += torch.tensor([6, 3, 0])
    assert sums.conditional_accuracy == pytest.approx([0.6, 0.5, 0.0])
    assert sums.simulated_acceptance_length == pytest.approx(1 + 0.6 + 0.3 + 0.0)


def test_a_nan_is_traced_to_its_document():
    documents = [tiny_document("good", 8, 2), tiny_document("bad", 8, 2), tiny_document("fine", 8, 2)]
    documents[1].aux[3, 0] = float("nan")
    result = graded(tiny_draft(), documents)
    assert not result.total.isfinite()
    assert result.not_finite == ["bad"]


def test_a_batch_without_supervised_rows_has_loss_zero_and_zero_gradients():
    draft = tiny_draft()
    result = graded(draft, [tiny_document("c", 9, 9)])
    result.total.backward()
    assert result.total.item() == 0
    assert all(not grad.any() for grad in gradients(draft).values())


def test_bfloat16_compute_stays_close_to_float32():
    draft = tiny_draft()
    exact = graded(draft, DOCUMENTS).total.item()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = graded(draft, DOCUMENTS, teacher=tiny_teacher(torch.bfloat16)).total.item()
    assert rounded == pytest.approx(exact, rel=2e-2)
