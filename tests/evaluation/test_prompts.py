"""Prompts are read strictly, chosen evenly, and kept apart from what was trained on."""

import json

import pytest

from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.evaluation.prompts import Prompt, choose_prompts, read_prompts, trained_on
from tests.makers import write_jsonl


def row(number: int, category: str = "a", **more) -> dict:
    return {"question_id": number, "category": category, "turns": [f"question {number}"], **more}


def test_only_the_first_turn_is_asked_through_the_chat_template(tiny, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"category": "a", "turns": ["about tea", "and then?"], "reference": 1}])
    (prompt,) = read_prompts(path, tiny.target)
    text = tiny.target.tokenizer.decode(prompt.input_ids)
    assert text == "<|im_start|>user\nabout tea<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.prompt_id, prompt.category, prompt.text) == ("line-1", "a", "about tea")


def test_a_byte_order_mark_and_empty_lines_are_accepted(tiny, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row(7)).encode() + b"\n\n" + json.dumps(row(8)).encode())
    assert [prompt.prompt_id for prompt in read_prompts(path, tiny.target)] == ["7", "8"]


def test_every_wrong_line_is_named_with_its_reason(tiny, tmp_path):
    path = tmp_path / "p.jsonl"
    lines = ["{", "[]", *map(json.dumps, [row(1, turns=[]), row(2, category=3), row(3), row(3)])]
    path.write_text("\n".join(lines))
    with pytest.raises(CheckRefused) as caught:
        read_prompts(path, tiny.target)
    said = str(caught.value)
    for part in ("line 1: not JSON", "line 2: a list", "line 3: `turns`", "line 4: `category` is 3"):
        assert part in said
    assert "line 6: question_id 3 is that of line 5" in said


def test_a_missing_or_empty_file_is_refused(tiny, tmp_path):
    with pytest.raises(BadParams, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", tiny.target)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CheckRefused, match="holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl", tiny.target)
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(CheckRefused, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl", tiny.target)


def test_prompts_are_dealt_evenly_over_the_categories_in_file_order():
    prompts = [Prompt(str(n), category, "", (n,)) for n, category in enumerate("aaaaabbbbc")]
    assert [p.prompt_id for p in choose_prompts(prompts, 7)] == ["0", "1", "2", "5", "6", "7", "9"]
    assert choose_prompts(prompts, 99) == prompts


def test_a_prompt_that_begins_a_training_sample_is_found(tiny, tmp_path):
    trained = "tell me about rivers number 0"  # the first conversation of the fixture
    rows = [row(1, turns=[trained]), row(2, turns=[trained + " please"]), row(3, turns=["more"])]
    prompts = read_prompts(write_jsonl(tmp_path / "p.jsonl", rows), tiny.target)
    assert trained_on(prompts, tiny.samples) == {"1"}
