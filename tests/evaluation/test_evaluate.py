"""An evaluation says what the draft is worth, beside what costs nothing, and does not pass a draft that was not used."""

import json
import math

import pytest

from eagle3_helpers.draft.export import export_sglang
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.evaluation import evaluate as module
from eagle3_helpers.evaluation.evaluate import evaluate
from eagle3_helpers.evaluation.prompts import Prompt
from tests.makers import write_jsonl


@pytest.fixture(scope="module")
def ask(tiny, tmp_path_factory):
    """ask(draft, rows, **params): exports the draft and evaluates it on prompts given as texts by category."""

    def run(draft, rows, **params):
        home = tmp_path_factory.mktemp("evaluation")
        rows = [{"question_id": n, "category": c, "turns": [text]} for n, (c, text) in enumerate(rows)]
        path = write_jsonl(home / "prompts.jsonl", rows)
        settings = tiny.params.evaluation.model_copy(update={"prompts": str(path), "batch": 2, **params})
        export_sglang(draft.trained_weights(), draft.config, tiny.draft_vocab, tiny.target, home / "export")
        result = evaluate(settings, tiny.target, home / "export", tiny.samples, tiny.make_draft(9))
        return result

    return run


PROMPTS = [("x", "say tea"), ("y", "say boats"), ("x", "say maps and salt"), ("z", "say")]


@pytest.fixture(scope="module")
def evaluated(tiny, ask):
    return ask(tiny.make_draft(1), PROMPTS, answer_tokens=30)


def test_the_summary_has_every_number_and_survives_json(evaluated):
    result = evaluated
    summary = json.loads(json.dumps(result.summary, allow_nan=False))
    assert summary == result.summary
    assert summary["n_prompts"] == 4 and summary["tokens"] == sum(row["tokens"] for row in result.rows)
    assert math.isclose(summary["acceptance_length"], summary["tokens"] / summary["steps"])
    low, high = summary["acceptance_interval"]
    assert low <= summary["acceptance_length"] <= high
    assert list(summary["per_category"]) == ["x", "y", "z"] and summary["per_category"]["x"]["n_prompts"] == 2
    assert len(summary["per_position"]) == 3
    assert list(result.by_category) == ["x", "y", "z"] and len(result.by_category["y"]) == 3
    assert summary["lossless_mismatches"] == 0 and summary["ties"] == []
    assert summary["acceptance_length_untrained"] >= 1 and summary["acceptance_length_bigram"] >= 1


def test_a_row_a_prompt_in_file_order(evaluated):
    rows = json.loads(json.dumps(evaluated.rows))
    assert rows == evaluated.rows and [row["prompt_id"] for row in rows] == ["0", "1", "2", "3"]
    assert all(isinstance(row["text"], str) and row["tokens"] <= 30 for row in rows)


def test_a_draft_that_learned_the_answers_is_used_and_beats_what_costs_nothing(tiny, taught, ask, monkeypatch):
    prompts = [Prompt(str(n), "c", "", tuple(ids)) for n, ids in enumerate(tiny.prompts)]
    monkeypatch.setattr(module, "read_prompts", lambda path, target: prompts)
    result = ask(taught, [], answer_tokens=24)
    summary = result.summary
    assert summary["verdict"] == "draft used" and result.checks.ok
    assert summary["acceptance_length"] > 1.5 > summary["acceptance_length_untrained"]
    assert summary["acceptance_length"] > summary["acceptance_length_bigram"]
    first, second, third = summary["per_position"]
    assert 1 > first > second > third > 0


def test_a_draft_of_which_nothing_is_accepted_was_not_used(tiny, ask):
    draft = tiny.make_draft(2)
    draft.lm_head.weight.data.zero_()  # always guesses draft id 0, the target's <|endoftext|>
    result = ask(draft, PROMPTS, answer_tokens=20)
    assert result.summary["verdict"] == "draft not used" and not any(result.summary["per_position"])
    with pytest.raises(CheckRefused) as caught:
        result.checks.require()
    for part in ("lm_head", "embeddings", "d2t", "layer ids", "norm flags"):
        assert part in str(caught.value)
    assert "draft not used" in repr(result) and "draft not used" in result._repr_html_()


def test_answers_that_differ_from_greedy_beyond_a_tie_fail(tiny, ask, monkeypatch):
    honest = module.greedy

    def off_by_one(*args, **kwargs):
        answers = honest(*args, **kwargs)
        answers[0][0] = (answers[0][0] + 1) % 384
        return answers

    monkeypatch.setattr(module, "greedy", off_by_one)
    result = ask(tiny.make_draft(1), PROMPTS, tie_gap=0.01)
    assert result.summary["lossless_mismatches"] == 2 and not result.checks.ok  # one in each batch of two
    assert {row["place"] for row in result.summary["mismatches"]} == {0}
    tied = ask(tiny.make_draft(1), PROMPTS, tie_gap=1e6)
    assert tied.summary["lossless_mismatches"] == 0 and len(tied.summary["ties"]) == 2


def test_trained_on_and_too_long_prompts_are_left_out_and_listed(tiny, ask):
    rows = [("a", "tell me about rivers number 0"), ("a", "tea " * 600), ("b", "say tea")]
    result = ask(tiny.make_draft(1), rows)
    assert result.summary["left_out"] == {"trained_on": ["0"], "too_long": ["1"]}
    assert [row["prompt_id"] for row in result.rows] == ["2"]
    with pytest.raises(CheckRefused, match="1 begin a training sample and 1 are too long"):
        ask(tiny.make_draft(1), rows[:2])
