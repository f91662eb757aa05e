"""Does speculative decoding change the answer? Judged where it first differs from plain greedy decoding.

Behind the first difference the two run on different texts, so only that place says anything. In bfloat16 a forward over
K+1 tokens rounds differently from one over a single token, and two tokens with nearly equal logits may change places: a
tie. A mismatch is a difference at a place where one of the two tokens is clearly not the target's choice.
"""

import dataclasses

import torch

from eagle3_helpers.evaluation.reference_decoding import left_padded


@dataclasses.dataclass(frozen=True)
class Difference:
    """First differing place of one answer. `gap` in logits: how far the worse of the two tokens lies below the best one;
    None where one answer just ends before the other."""

    prompt: int  # index in the batch
    place: int  # index in the answer
    greedy: int | None
    decoded: int | None
    gap: float | None

    def is_tie(self, tie_gap: float) -> bool:
        return self.gap is not None and self.gap <= tie_gap


@torch.inference_mode()
def greedy(model, prompts: list, *, answer_tokens: int, stop_ids: list[int]) -> list[list[int]]:
    """The target's own answers, by Hugging Face `generate`: one token a forward, through the stop token or the budget."""
    from transformers import GenerationConfig

    ids, valid, _ = left_padded(prompts, model.device)
    kept = model.generation_config
    # generate() fills what a given config leaves open from the model's own, e.g. a repetition penalty: not plain greedy.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=answer_tokens, eos_token_id=list(stop_ids) or None, pad_token_id=0
    )
    try:
        answers = model.generate(input_ids=ids, attention_mask=valid.long())[:, ids.shape[1] :].tolist()
    finally:
        model.generation_config = kept
    ends = [next((place + 1 for place, token in enumerate(a) if token in stop_ids), len(a)) for a in answers]
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)]


@torch.inference_mode()
def first_differences(model, prompts: list, plain: list[list[int]], decoded: list[list[int]]) -> list[Difference]:
    """One Difference for each prompt whose answers differ; the gap comes from one forward in the model's dtype."""
    places = {}
    for number, (one, other) in enumerate(zip(plain, decoded, strict=True)):
        if one != other:
            shorter = min(len(one), len(other))
            places[number] = next((p for p in range(shorter) if one[p] != other[p]), shorter)
    judged = [n for n, place in places.items() if place < min(len(plain[n]), len(decoded[n]))]
    gaps = {}
    if judged:
        ids, valid, positions = left_padded([[*prompts[n], *plain[n][: places[n]]] for n in judged], model.device)
        output = model(input_ids=ids, attention_mask=valid.long(), position_ids=positions, logits_to_keep=1)
        for n, logits in zip(judged, output.logits[:, -1].float(), strict=True):
            pair = logits[[plain[n][places[n]], decoded[n][places[n]]]]
            gaps[n] = float(logits.max() - pair.min())
    return [
        Difference(
            prompt=n,
            place=place,
            greedy=plain[n][place] if place < len(plain[n]) else None,
            decoded=decoded[n][place] if place < len(decoded[n]) else None,
            gap=gaps.get(n),
        )
        for n, place in places.items()
    ]
