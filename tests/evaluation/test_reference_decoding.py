"""Decoding yields the target's own answer whatever the draft says, and its counts are what happened."""

import functools

import pytest
import torch

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.evaluation.reference_decoding import decode
from tests.evaluation.conftest import draft_rows, true_aux

STOP = [383]  # a token that the answers of the fixture never reach


def run(tiny, draft, prompts=None, answer_tokens=24, draft_tokens=3, stop_ids=STOP, **more):
    return decode(
        tiny.model,
        draft,
        tiny.draft_vocab,
        prompts or tiny.prompts,
        answer_tokens=answer_tokens,
        draft_tokens=draft_tokens,
        stop_ids=stop_ids,
        **more,
    )


@pytest.mark.parametrize(("seed", "draft_tokens"), [(0, 1), (1, 3), (2, 5)])
def test_a_random_draft_does_not_change_the_answer(tiny, seed, draft_tokens):
    answers = run(tiny, tiny.make_draft(seed), draft_tokens=draft_tokens)
    assert [answer.tokens for answer in answers] == tiny.answers


def test_a_draft_that_is_often_right_does_not_change_the_answer_either(tiny, taught):
    answers = run(tiny, taught)
    assert [answer.tokens for answer in answers] == tiny.answers
    accepted = [sum(answer.accepted[place] for answer in answers) for place in range(3)]
    steps = sum(answer.steps for answer in answers)
    assert steps > accepted[0] > accepted[1] > accepted[2] > 0


def test_the_counts_add_up(tiny, taught):
    for budget in (1, 2, 7, 24):
        for answer in run(tiny, taught, answer_tokens=budget):
            assert len(answer.tokens) == budget == 1 + answer.steps + sum(answer.accepted) - answer.cut
    assert run(tiny, taught, answer_tokens=1)[0].steps == 0


def test_a_prompt_alone_gives_what_it_gives_in_a_batch(tiny, taught):
    together = run(tiny, taught)
    assert [run(tiny, taught, prompts=[prompt])[0] for prompt in tiny.prompts] == together


def test_the_drafted_tokens_are_those_of_a_draft_without_caches(tiny, taught, monkeypatch):
    """Every block that the target verifies is recomputed: true states of all known tokens, then the chain, from nothing."""
    forward, blocks = tiny.model.forward, []

    @functools.wraps(forward)
    def recording(*args, **kwargs):
        blocks.append(kwargs["input_ids"])
        return forward(*args, **kwargs)

    for prompt, answer in zip(tiny.prompts, tiny.answers, strict=True):
        blocks.clear()
        monkeypatch.setattr(tiny.model, "forward", recording)
        run(tiny, taught, prompts=[prompt])
        monkeypatch.setattr(tiny.model, "forward", forward)
        text, known = prompt + answer, len(prompt) + 1
        for block in blocks[1:]:
            drafted = chain(tiny, taught, torch.tensor([text[:known]]), 3)
            assert block[0].tolist() == [text[known - 1], *drafted]
            right = 0
            while right < 3 and known + right < len(text) and drafted[right] == text[known + right]:
                right += 1
            known += right + 1
        assert known >= len(text)


@torch.no_grad()
def chain(tiny, draft, ids, count: int) -> list[int]:
    """`count` draft tokens after the known ids [1, T+1]."""
    aux = true_aux(tiny, ids[:, :-1])
    states = draft_rows(draft, ids, aux)
    hidden, fed = states[:, -1:], ids[:, :0]
    while True:
        token = tiny.draft_vocab.target_ids[draft.logits(states[:, -1:]).argmax(-1)]
        fed = torch.cat([fed, token], 1)
        if fed.shape[1] == count:
            return fed[0].tolist()
        states = draft_rows(draft, ids, aux, hidden, fed)
        hidden = torch.cat([hidden, states[:, -1:]], 1)


def test_a_draft_that_knows_the_answer_is_accepted_whole(tiny, monkeypatch):
    """Row t guesses x_{t+2}: a draft that looks it up by its row's position yields K+1 tokens a step."""
    draft, texts = tiny.make_draft(), [p + a + [0] * 8 for p, a in zip(tiny.prompts, tiny.answers, strict=True)]
    queries, row = draft.queries, {}

    def look(inputs, positions):
        row["position"] = positions[:, 0].tolist()
        return queries(inputs, positions)

    def logits(hidden):
        right = [text[position + 2] for text, position in zip(texts, row["position"], strict=True)]
        return torch.nn.functional.one_hot(torch.tensor(right), 384)[:, None].float()

    monkeypatch.setattr(draft, "queries", look)
    monkeypatch.setattr(draft, "logits", logits)
    for answer, expected in zip(run(tiny, draft, answer_tokens=21, draft_tokens=4), tiny.answers, strict=True):
        assert answer.tokens == expected[:21]
        assert (answer.steps, answer.accepted, answer.cut) == (4, [4, 4, 4, 4], 0)


def test_a_stop_token_ends_an_answer_and_is_its_last_token(tiny, taught):
    stop = tiny.answers[1][9]
    ends = [answer.index(stop) + 1 if stop in answer else 24 for answer in tiny.answers]
    ended = []
    answers = run(tiny, taught, stop_ids=[stop], ended=ended.append)
    assert [answer.tokens for answer in answers] == [a[:end] for a, end in zip(tiny.answers, ends, strict=True)]
    assert min(ends) < 24 and sum(ended) == len(tiny.prompts)
    assert all(len(a.tokens) == 1 + a.steps + sum(a.accepted) - a.cut for a in answers)


def test_a_target_with_sliding_window_layers_is_refused(tiny, monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 8, "vocab_size": 384}
    config = MistralConfig(**small, num_attention_heads=4, num_key_value_heads=2, sliding_window=16)
    monkeypatch.setattr(tiny, "model", MistralForCausalLM(config).eval())
    with pytest.raises(CheckRefused, match="sliding-window"):
        run(tiny, tiny.make_draft())
