import pytest
import torch

from eagle3_helpers.training import loss
from eagle3_helpers.training.loss import soft_cross_entropy


def pieces(dtype=torch.float64, n=11, hidden=5, vocab=13, positions=4):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, hidden, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, hidden, generator=generator, dtype=dtype, requires_grad=True)
    p = torch.softmax(torch.randn(positions, vocab, generator=generator, dtype=dtype), -1)
    return z, head, p, torch.arange(n) % positions, torch.rand(n, generator=generator, dtype=dtype)


def plain(z, head, p, index, weights):
    return (weights * -(p[index] * torch.log_softmax(z @ head.T, -1)).sum(-1)).sum()


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_gradient_equals_autograd_of_the_plain_formula(monkeypatch, chunk_rows):
    z, head, p, index, weights = pieces()
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_rows * len(head))
    expected = torch.autograd.grad(3 * plain(z, head, p, index, weights), (z, head))
    fused = soft_cross_entropy(z, head, p, index, weights)
    assert torch.allclose(fused.total, plain(z, head, p, index, weights), rtol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(3 * fused.total, (z, head)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    assert fused.predicted.tolist() == (z @ head.T).argmax(-1).tolist()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_still_does():
    z, head, p, index, weights = pieces()
    head = head.detach()
    expected = torch.autograd.grad(plain(z, head, p, index, weights), z)[0]
    assert torch.allclose(torch.autograd.grad(soft_cross_entropy(z, head, p, index, weights).total, z)[0], expected)


def test_without_autograd_the_values_are_the_same():
    z, head, p, index, weights = pieces()
    with torch.no_grad():
        silent = soft_cross_entropy(z, head, p, index, weights)
    assert torch.equal(silent.cross_entropy, soft_cross_entropy(z, head, p, index, weights).cross_entropy)


def test_bfloat16_products_keep_a_float32_loss_and_head_gradient():
    z, head, p, index, weights = pieces(torch.float32)
    small = soft_cross_entropy(z.to(torch.bfloat16), head, p, index, weights)
    assert small.total.dtype == torch.float32
    assert torch.allclose(small.total, plain(z, head, p, index, weights), rtol=2e-2)
    assert torch.autograd.grad(small.total, head)[0].dtype == torch.float32


def test_no_supervised_rows_make_a_loss_of_zero_with_zero_gradients():
    z, head, p, index, weights = pieces()
    total = soft_cross_entropy(z[:0], head, p, index[:0], weights[:0]).total
    assert total.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(total, (z, head), allow_unused=False))
