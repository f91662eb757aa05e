"""The answer is compared with plain greedy decoding where it first differs, and a tie is not a mismatch."""

import copy

from eagle3_helpers.evaluation.lossless import first_differences, greedy


def test_equal_answers_have_no_differences(tiny):
    assert first_differences(tiny.model, tiny.prompts, tiny.answers, copy.deepcopy(tiny.answers)) == []


def test_a_wrong_token_is_found_at_its_place_with_the_gap_that_the_target_sees(tiny):
    decoded = copy.deepcopy(tiny.answers)
    decoded[1][5] = (decoded[1][5] + 1) % 384
    decoded[1][9:] = [0] * 15  # what follows the first difference says nothing
    (difference,) = first_differences(tiny.model, tiny.prompts, tiny.answers, decoded)
    assert (difference.prompt, difference.place, difference.greedy) == (1, 5, tiny.answers[1][5])
    assert difference.gap > 0.05 and not difference.is_tie(0.05) and difference.is_tie(difference.gap)


def test_a_token_that_is_wrong_in_the_baseline_is_no_tie_either(tiny):
    baseline = copy.deepcopy(tiny.answers)
    baseline[0][0] = (baseline[0][0] + 1) % 384
    (difference,) = first_differences(tiny.model, tiny.prompts, baseline, tiny.answers)
    assert difference.gap > 0.05


def test_an_answer_that_just_ends_early_is_never_a_tie(tiny):
    decoded = [*tiny.answers[:3], tiny.answers[3][:10], tiny.answers[4]]
    (difference,) = first_differences(tiny.model, tiny.prompts, tiny.answers, decoded)
    assert (difference.place, difference.decoded, difference.gap) == (10, None, None)
    assert not difference.is_tie(1e9)


def test_the_baseline_ignores_penalties_in_the_models_generation_config(tiny, monkeypatch):
    own = copy.deepcopy(tiny.model.generation_config)
    own.repetition_penalty, own.no_repeat_ngram_size, own.do_sample = 30.0, 1, True
    monkeypatch.setattr(tiny.model, "generation_config", own)
    assert greedy(tiny.model, tiny.prompts, answer_tokens=24, stop_ids=[383]) == tiny.answers
    assert tiny.model.generation_config is own


def test_the_baseline_ends_with_the_stop_token(tiny):
    stop = tiny.answers[2][4]
    answer = greedy(tiny.model, tiny.prompts, answer_tokens=24, stop_ids=[stop])[2]
    assert answer == tiny.answers[2][: tiny.answers[2].index(stop) + 1]
