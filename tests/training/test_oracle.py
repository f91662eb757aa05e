"""Our step against the numbers of both published trainers (tests/data/oracle.safetensors; its metadata says how it was made)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_helpers.draft.model import Draft, DraftConfig
from eagle3_helpers.training.batches import Document, pack
from eagle3_helpers.training.step import Exam, Teacher, grade, set_exam, ttt_hidden

T, STEPS = 24, 3
CONFIG = DraftConfig(
    hidden_size=64,
    vocab_size=128,
    draft_vocab_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    max_position_embeddings=128,
    boundaries=[2, 4, 5],
)


@pytest.fixture(scope="module")
def oracle() -> dict[str, torch.Tensor]:
    return load_file(Path(__file__).parents[1] / "data" / "oracle.safetensors")


@pytest.fixture
def draft(oracle) -> Draft:
    names = [name for name in oracle if name.startswith("weights/")]
    draft = Draft(CONFIG).load_weights({name.removeprefix("weights/"): oracle[name] for name in names})
    draft.embed_tokens.weight.requires_grad_(False)
    return draft


@pytest.fixture
def teacher(oracle) -> Teacher:
    return Teacher(oracle["input/target_lm_head"], oracle["input/d2t"], torch.float32, "cpu")


def document(oracle, zero_tail: int = 0) -> Document:
    """The oracle's sample; both trainers fill with zeros behind its end, which `zero_tail` more tokens reproduce."""

    def tail(tensor):
        return torch.cat([tensor, tensor.new_zeros(zero_tail, *tensor.shape[1:])])

    return Document(
        "oracle",
        tail(oracle["input/input_ids"]),
        tail(oracle["input/loss_mask"]),
        tail(oracle["input/aux_hidden_states"]),
        tail(oracle["input/last_hidden_postnorm"]),
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within 1e-5 of the largest number in the tensor."""
    return (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("peer", ["specforge", "speculators"])
def test_logits_of_every_row_and_step_equal_the_peer(oracle, draft, peer):
    every_row = torch.zeros(STEPS, T + STEPS - 1, dtype=torch.bool)
    every_row[:, : T - 1] = True
    states = ttt_hidden(draft, pack([document(oracle, zero_tail=STEPS)]), every_row)
    for i, (rows, hidden) in enumerate(states):
        assert rows.tolist() == list(range(T - 1))
        assert close(draft.logits(hidden), oracle[f"{peer}/step{i}/logits"]), f"step {i}"


def check_gradients(oracle, draft, peer):
    theirs = {name.split("/grad/")[1]: grad for name, grad in oracle.items() if name.startswith(f"{peer}/grad/")}
    ours = {name: weight.grad for name, weight in draft.named_parameters() if weight.grad is not None}
    assert set(ours) == set(theirs)
    assert [name for name in theirs if not close(ours[name], theirs[name])] == []


def test_masks_losses_and_gradients_equal_specforge_with_its_mask_mended(oracle, draft, teacher):
    exam = set_exam(pack([document(oracle)]), teacher, STEPS)
    for i in range(STEPS):
        assert exam.supervised[i].tolist() == oracle[f"specforge/step{i}/loss_mask"][: T - 1].bool().tolist()
        assert exam.learned[i].tolist() == oracle[f"specforge/step{i}/position_mask"][: T - 1].bool().tolist()
    decay = 0.8 ** torch.arange(STEPS)
    result = grade(draft, exam, teacher, exam.learned * decay[:, None] / T)  # SpecForge divides by all B * T rows
    losses = torch.cat([oracle[f"specforge/step{i}/loss"] for i in range(STEPS)])
    assert close(result.sums.loss.float() / T, losses)
    assert close(result.total.detach(), oracle["specforge/total_loss"])
    correct = torch.cat([oracle[f"specforge/step{i}/acc_correct"] for i in range(STEPS)])
    assert result.sums.correct.tolist() == correct.tolist()
    assert result.sums.supervised.tolist() == [oracle[f"specforge/step{i}/acc_denom"].item() for i in range(STEPS)]
    result.total.backward()
    check_gradients(oracle, draft, "specforge")


def test_losses_and_gradients_equal_speculators(oracle, draft, teacher):
    """speculators keeps rows outside the draft vocabulary, freezes lm_head and reports KL: cross entropy minus entropy."""
    draft.lm_head.weight.requires_grad_(False)
    exam = set_exam(pack([document(oracle)]), teacher, STEPS)
    exam = Exam(exam.batch, exam.truth, exam.supervised, learned=exam.supervised)
    counts = exam.supervised.sum(1) + 1e-5
    result = grade(draft, exam, teacher, exam.supervised / counts[:, None])
    p = teacher.probabilities(exam.batch.last)
    entropy = -(p * p.log()).sum(-1)
    for i in range(STEPS):
        asked = exam.supervised[i].nonzero().squeeze(1) + i
        ours = (result.sums.loss[i] - entropy[asked].double().sum()) / counts[i]
        assert close(ours, oracle[f"speculators/step{i}/loss"]), f"step {i}"
    result.total.backward()
    check_gradients(oracle, draft, "speculators")
