"""A tiny draft, teacher and documents on plain tensors, for tests that need no target and no files."""

import torch

from eagle3_helpers.draft.model import Draft, DraftConfig
from eagle3_helpers.training.batches import Document, pack
from eagle3_helpers.training.step import Teacher, grade, row_weights, set_exam

HIDDEN, VOCAB, DRAFT_VOCAB, STEPS = 16, 48, 24, 3
CONFIG = DraftConfig(
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=128,
    boundaries=[2, 4, 5],
)
D2T = torch.arange(DRAFT_VOCAB)  # the draft's vocabulary is the even ids


def tiny_draft(seed: int = 0, dtype: torch.dtype = torch.float32) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(CONFIG)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.3 * noise)
    draft.embed_tokens.weight.requires_grad_(False)
    return draft.to(dtype)


def tiny_teacher(dtype: torch.dtype = torch.float32) -> Teacher:
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
    return Teacher(head, D2T, dtype, "cpu")


def tiny_document(name: str, length: int, prompt: int, seed: int = 0) -> Document:
    """`length` tokens, of which all after the first `prompt` are supervised."""
    generator = torch.Generator().manual_seed(seed + 100 * length)
    return Document(
        sample_id=name,
        input_ids=torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32),
        loss_mask=(torch.arange(length) >= prompt).to(torch.uint8),
        aux=torch.randn(length, 3 * HIDDEN, generator=generator),
        last=torch.randn(length, HIDDEN, generator=generator),
    )


def graded(draft, documents, counts=None, decay=0.8, teacher=None):
    """Forward of one packed batch; `counts` are the learned rows of the whole optimizer step (default: of this batch)."""
    teacher = teacher or tiny_teacher()
    exam = set_exam(pack(documents), teacher, STEPS)
    weights = row_weights(exam.learned, exam.learned.sum(1) if counts is None else counts, decay)
    return grade(draft, exam, teacher, weights)


def gradients(draft) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in draft.named_parameters() if weight.grad is not None}
