"""Speculative decoding in one readable function: a chain of K draft tokens, greedy verification, both KV caches in sight.

One round: the draft extends its cache with what the target just proved, drafts K tokens, the target runs once over K+1
tokens, the longest prefix equal to its own greedy choice is accepted, and its choice after that prefix (the bonus token)
comes free. So the answer is the target's own, whatever the draft says; only the number of rounds depends on the draft.

Alignment, as trained and as SGLang serves: x_t token, a_t aux states at t. Draft row t is fed x_{t+1} and fc(a_t) and
predicts x_{t+2}; with x_0..x_T known, the last row is T-1, and its first guess is for x_{T+1}. Later rows of the chain
are fed the drafted token and the row's own pre-norm state. After verification their entries in the draft's cache are
dropped and computed again from the target's true states ("draft extend").

Slots and positions: prompts are padded on the left and every prompt of a batch appends K+1 slots a round, so prompts
that accept different numbers stay in one batch. Rejected slots remain, masked out by `valid`. Target slot of x_t and
draft slot of row t coincide, so one `valid` serves both caches; positions are true positions, not slots.

Shapes: B prompts still running, P padded prompt length, K draft tokens, Q new slots, S slots, H hidden,
D draft vocabulary, E head width.
"""

import dataclasses
import inspect
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from eagle3_helpers.errors import CheckRefused, StageFailed


@dataclasses.dataclass
class Answer:
    """One prompt's answer and its counts, as SGLang counts completion_tokens and spec_verify_ct.

    `tokens` are all generated ones, from the prompt's own forward (the first, which needs no step) through the stop token
    or the budget. `steps` counts verification forwards, the last one too even if part of it is cut off. `accepted[j]`
    counts the steps whose draft tokens 1..j+1 were all accepted, before the cut; `cut` is what lay behind the end.
    So len(tokens) == 1 + steps + sum(accepted) - cut.
    """

    tokens: list[int]
    steps: int
    accepted: list[int]
    cut: int = 0


@torch.inference_mode()
def decode(
    model,
    draft,
    draft_vocab,
    prompts: list,
    *,
    answer_tokens: int,
    draft_tokens: int,
    stop_ids: list[int],
    ended: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """The answers of the target `model` (Hugging Face causal LM) to a batch of token id lists, in their order.

    `draft` and `draft_vocab` are in the model's dtype and on its device. `ended(n)` is called as n prompts end.
    Raises CheckRefused for a target with sliding-window layers, where a rejected slot would push a true one out.
    """
    K, boundaries = draft_tokens, draft.config.boundaries
    to_target = draft_vocab.target_ids.to(model.device)
    answers = [Answer([], 0, [0] * K) for _ in prompts]
    running = list(range(len(prompts)))

    # The prompt: the target's states for x_0..x_{T-1}, and x_T, the first token of the answer.
    ids, valid, positions = left_padded(prompts, model.device)  # [B, P] each
    target_cache, draft_cache = DynamicCache(config=model.config.get_text_config()), None
    if any(target_cache.is_sliding):
        raise CheckRefused(
            "the target has sliding-window layers, which the reference decoding cannot mask.", "Measure it with SGLang."
        )
    output = _target_forward(model, ids, positions, valid, target_cache, logits_to_keep=1)
    known = output.logits[:, -1:].argmax(-1)  # [B, 1]: x_T, the newest known token
    fed = torch.cat([ids[:, 1:], known], 1)  # [B, Q]: row t of the draft is fed x_{t+1} ...
    aux = torch.cat([output.hidden_states[k] for k in boundaries], -1)  # [B, Q, 3H]: ... with a_t
    newest = torch.full((len(prompts),), ids.shape[1] - 1, device=model.device)  # [B]: where row T-1 lies in `fed`
    for number, token in zip(running, known[:, 0].tolist(), strict=True):
        _take(answers[number], [token], answer_tokens, stop_ids)

    while True:
        kept = [row for row, number in enumerate(running) if not _over(answers[number], answer_tokens, stop_ids)]
        if len(kept) < len(running):
            ended(len(running) - len(kept))
            running = [running[row] for row in kept]
            if not running:
                return answers
            chosen_rows = torch.tensor(kept, device=model.device)
            target_cache.batch_select_indices(chosen_rows)
            draft_cache = draft_cache and tuple(tensor[chosen_rows] for tensor in draft_cache)
            valid, positions, known, fed, aux, newest = (
                tensor[chosen_rows] for tensor in (valid, positions, known, fed, aux, newest)
            )

        # Draft extend: the rows that the target's states made true; the newest of them drafts the first token.
        hidden, draft_cache = _draft_forward(draft, fed, draft.fuse(aux), positions, newest, valid, draft_cache)
        position = _pick(positions, newest)  # [B, 1]; hidden is [B, 1, H]
        block, only = [known], torch.zeros_like(newest)
        scratch, scratch_valid = draft_cache, valid
        for step in range(1, K + 1):
            block.append(to_target[draft.logits(hidden).argmax(-1)])  # [B, 1]
            if step < K:
                scratch_valid = torch.cat([scratch_valid, valid.new_ones(len(running), 1)], 1)
                hidden, scratch = _draft_forward(
                    draft, block[-1], hidden, position + step, only, scratch_valid, scratch
                )
        block = torch.cat(block, 1)  # [B, K+1]: x_T and the drafted x_{T+1}..x_{T+K}

        # Verification: one forward of the target; choice[:, j] is its own token after block[:, :j+1].
        positions = position + 1 + torch.arange(K + 1, device=model.device)
        valid = torch.cat([valid, valid.new_ones(len(running), K + 1)], 1)
        output = _target_forward(model, block, positions, valid, target_cache)
        choice = output.logits.argmax(-1)  # [B, K+1]
        newest = (block[:, 1:] == choice[:, :-1]).long().cumprod(1).sum(1)  # [B]: accepted draft tokens
        valid[:, -K - 1 :] = torch.arange(K + 1, device=model.device) <= newest[:, None]

        # What is known now: x_{T+1}.. are choice[:, :newest+1]; the last of them is the new x_T.
        known, fed = _pick(choice, newest), choice
        aux = torch.cat([output.hidden_states[k] for k in boundaries], -1)
        for number, accepted, tokens in zip(running, newest.tolist(), choice.tolist(), strict=True):
            answers[number].steps += 1
            for place in range(accepted):
                answers[number].accepted[place] += 1
            _take(answers[number], tokens[: accepted + 1], answer_tokens, stop_ids)


def _target_forward(model, ids, positions, valid, cache, **options):
    """Runs the target over Q new tokens: ids and positions [B, Q], valid [B, S] with the new tokens last."""
    # transformers renamed the argument in 5.x, and a model takes an unknown one without a word.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options |= {name: cache, "use_cache": True, "output_hidden_states": True}
    output = model(input_ids=ids, attention_mask=valid.long(), position_ids=positions, **options)
    if cache.get_seq_length() != valid.shape[1]:
        raise StageFailed(
            f"the target's cache holds {cache.get_seq_length()} tokens after {valid.shape[1]} were fed.",
            "This model class keeps its cache in another way; measure it with SGLang.",
        )
    return output


def _draft_forward(draft, ids, hidden, positions, newest, valid, cache):
    """Adds Q rows to the draft's cache and runs its layer for one of them, the newest.

    ids and positions [B, Q], hidden [B, Q, H], newest [B] in 0..Q-1, valid [B, S] with the new rows last. Keys and values
    of a single layer hang on no attention, so the other rows need neither queries nor MLP; nor is a causal mask needed.
    Returns the newest row's pre-norm state [B, 1, H] and the longer cache: keys and values, each [B, key heads, S, E].
    """
    inputs = draft.layer_input(draft.embed(ids), hidden)
    key, value = (heads.transpose(1, 2) for heads in draft.keys_values(inputs, positions))
    if cache is not None:
        key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
    query = draft.queries(_pick(inputs, newest), _pick(positions, newest)).transpose(1, 2)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=valid[:, None, None], enable_gqa=True)
    return draft.finish(_pick(hidden, newest), attended.transpose(1, 2).flatten(2)), (key, value)


def _pick(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[B, Q, ...] at place [B] -> [B, 1, ...]"""
    return tensor[torch.arange(len(tensor), device=tensor.device), place][:, None]


def left_padded(prompts: list, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int64, valid bool, positions int64, each [B, P], for token id lists of different lengths."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    first = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device) - first[:, None]
    return ids, positions >= 0, positions.clamp(min=0)


def _over(answer: Answer, answer_tokens: int, stop_ids: list[int]) -> bool:
    return len(answer.tokens) >= answer_tokens or answer.tokens[-1] in stop_ids


def _take(answer: Answer, tokens: list[int], answer_tokens: int, stop_ids: list[int]) -> None:
    """Appends `tokens` up to the first stop token or the budget, and counts the rest as cut."""
    for place, token in enumerate(tokens):
        answer.tokens.append(token)
        if _over(answer, answer_tokens, stop_ids):
            answer.cut = len(tokens) - place - 1
            return
