"""Soft-target cross entropy over the draft vocabulary, fused with the draft's head.

The logits of all rows at all TTT steps would be the largest tensor of training by far. Here they exist for a chunk of rows at
a time, in float32, and the gradient with respect to the head's input and weight is made in the same pass: with weights w_n,
target probabilities p_n and logits x_n = W z_n,

    loss = sum_n w_n * ( -sum_d p_nd log softmax(x_n)_d )        d loss / d x_n = w_n * ( sum(p_n) softmax(x_n) - p_n )

The weights must be known before the forward; they carry every normalisation, so that nothing here averages.
"""

import dataclasses

import torch

from eagle3_helpers.training.even_rows import ROWS, even

CHUNK_LOGITS = 1 << 22  # float32 logits held at a time: 16 MB


@dataclasses.dataclass(frozen=True)
class RowLosses:
    total: torch.Tensor  # [] weighted sum, carries the gradient
    cross_entropy: torch.Tensor  # [n] float32, unweighted
    predicted: torch.Tensor  # [n] likeliest draft id


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, probabilities, index, row_weights, with_gradient):
        compute = weight.to(hidden.dtype)
        n, rows = len(hidden), max(1, CHUNK_LOGITS // len(weight) // ROWS) * ROWS
        losses = torch.empty(n, dtype=_wide(hidden), device=hidden.device)
        predicted = torch.empty(n, dtype=torch.long, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_gradient else None
        train_head = with_gradient and ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight) if train_head else None
        logits, target = (losses.new_empty(min(n, rows), len(weight)) for _ in range(2))  # reused by every chunk
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            z = hidden[part]
            x, p = logits[: len(z)].copy_(z @ compute.T), target[: len(z)].copy_(probabilities[index[part]])
            highest, predicted[part] = x.max(-1)
            mass = p.sum(-1)
            agreement = torch.linalg.vecdot(p, x)
            scale = x.sub_(highest[:, None]).exp_().sum(-1)
            losses[part] = (highest + scale.log()) * mass - agreement
            if with_gradient:
                w = row_weights[part]
                g = x.mul_((mass * w / scale)[:, None]).sub_(p.mul_(w[:, None])).to(hidden.dtype)
                torch.mm(g, compute, out=grad_hidden[part])
                if train_head:
                    grad_weight += g.T @ z
        ctx.save_for_backward(*(grad for grad in (grad_hidden, grad_weight) if grad is not None))
        ctx.mark_non_differentiable(losses, predicted)
        return (losses * row_weights).sum(), losses, predicted

    @staticmethod
    def backward(ctx, grad_total, *_):
        grads = [grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors]
        return grads[0], grads[1] if len(grads) > 1 else None, None, None, None, None


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def soft_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    probabilities: torch.Tensor,
    index: torch.Tensor,
    row_weights: torch.Tensor,
) -> RowLosses:
    """hidden [n, H] after the last norm, head [D, H], probabilities [P, D] of which row n uses entry index[n],
    row_weights [n] float32.

    The product runs in hidden's dtype, everything after it in float32 (float64 for float64). The head's gradient is
    accumulated in the head's own dtype. Without autograd only the values are computed.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    n = len(hidden)
    hidden, index, row_weights = even(hidden), even(index), even(row_weights.to(_wide(hidden)))
    with torch.autocast(hidden.device.type, enabled=False):
        total, losses, predicted = _FusedLinearCrossEntropy.apply(
            hidden, head, probabilities, index, row_weights, with_gradient
        )
    return RowLosses(total, losses[:n], predicted[:n])
