"""The target answers prompts: greedily, in the order of the source, one line a row, and across restarts."""

import json

import pytest
import torch

from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.samples import answers
from eagle3_helpers.samples.answers import NOT_ENDED, PROMPT_TOO_LONG, answer_prompts, cut_at_sentence, needs_answers
from eagle3_helpers.samples.conversations import Rejection, read_conversations
from eagle3_helpers.samples.masks import TEMPLATE_REFUSED, prompt_ids
from tests.makers import write_jsonl


def prompt(text: str, **fields) -> dict:
    return {**fields, "messages": [{"role": "user", "content": text}]}


ANSWERED = {"id": "done", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def alone(target, params):
    """What the target writes for one prompt without a batch around it: ids after the prompt, at most 12."""
    model = target.load_model("float32", "cpu")

    def answer(messages: list[dict]) -> list[int]:
        ids = prompt_ids(messages, target)
        fed = torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(12):
                fed = torch.cat([fed, model(fed).logits[:, -1:].argmax(-1)], 1)
                if fed[0, -1] in target.stop_ids:
                    break
        return fed[0, len(ids) :].tolist()

    return answer


@pytest.fixture
def keep_cut_answers(monkeypatch):
    """The tiny target writes no sentences; its cut answers are kept whole here."""
    monkeypatch.setattr(answers, "cut_at_sentence", lambda answer: answer)


@pytest.fixture
def settings(params):
    return params(answer_tokens=12, answer_batch=2)


def test_answers_are_the_targets_own_greedy_tokens_whatever_the_batch(
    tmp_path, target, settings, alone, keep_cut_answers
):
    rows = [prompt("rivers " * (1 + 3 * number % 7), id=f"p{number}", category="x") for number in range(11)]
    source, out = write_jsonl(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    counts = answer_prompts(settings, target, source, out)
    assert counts == {"rows": 11, "whole": 0, "cut": 11, "passed": 0, "rejected": {}}
    for row, line in zip(rows, lines(out), strict=True):
        answer = target.tokenizer.decode(alone(row["messages"]), skip_special_tokens=True)
        assert line == {
            **row,
            "answered": "cut",
            "messages": [*row["messages"], {"role": "assistant", "content": answer}],
        }


def test_an_answer_ends_where_the_target_ends_it(tmp_path, target, settings, alone):
    row = prompt("tell me about tea")
    written = alone(row["messages"])
    at = next(at for at in range(3, 12) if written[at] not in written[:at])
    target.stop_ids = [*target.stop_ids, written[at]]
    answer_prompts(settings, target, write_jsonl(tmp_path / "p.jsonl", [row]), tmp_path / "out.jsonl")
    [line] = lines(tmp_path / "out.jsonl")
    assert line["answered"] == "whole"
    assert line["messages"][-1]["content"] == target.tokenizer.decode(written[:at], skip_special_tokens=True)


def test_sampling_settings_of_the_model_folder_do_not_touch_the_answers(tmp_path, target, settings, keep_cut_answers):
    source = write_jsonl(tmp_path / "p.jsonl", [prompt("tell me about tea")])
    answer_prompts(settings, target, source, tmp_path / "plain.jsonl")
    load = target.load_model

    def load_with_penalty(*args):
        model = load(*args)
        model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
        return model

    target.load_model = load_with_penalty
    answer_prompts(settings, target, source, tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_every_row_of_the_source_has_a_line_in_its_place(tmp_path, target, settings, keep_cut_answers):
    rows = [prompt("tea"), ANSWERED, {"id": "e", "messages": []}, prompt("x" * 300, id="long"), prompt("salt")]
    out = tmp_path / "out.jsonl"
    counts = answer_prompts(settings, target, write_jsonl(tmp_path / "p.jsonl", rows), out)
    written = lines(out)
    assert [row.get("answered", row.get("rejected")) for row in written] == [
        "cut",
        None,
        "empty conversation",
        PROMPT_TOO_LONG,
        "cut",
    ]
    assert written[1] == ANSWERED
    assert written[3] == {"id": "long", "source_line": 4, "rejected": PROMPT_TOO_LONG}
    assert counts["rejected"] == {"empty conversation": 1, PROMPT_TOO_LONG: 1}
    reread = list(read_conversations(out))
    assert [item.reason for item in reread if isinstance(item, Rejection)] == ["empty conversation", PROMPT_TOO_LONG]
    assert needs_answers(out) == 0


def test_answers_without_a_whole_sentence_are_rejected_by_name(tmp_path, target, settings, monkeypatch):
    monkeypatch.setattr(answers, "cut_at_sentence", lambda answer: None)
    source = write_jsonl(tmp_path / "p.jsonl", [prompt("tea", id="a", category="c")])
    answer_prompts(settings, target, source, tmp_path / "out.jsonl")
    assert lines(tmp_path / "out.jsonl") == [{"id": "a", "category": "c", "source_line": 1, "rejected": NOT_ENDED}]


def test_a_prompt_that_the_template_refuses_is_rejected_and_the_others_are_answered(
    tmp_path, target, settings, keep_cut_answers
):
    refuses = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    target.tokenizer.chat_template = refuses + target.tokenizer.chat_template
    source = write_jsonl(
        tmp_path / "p.jsonl", [prompt("tea", answer="42"), prompt("bad"), prompt("salt", tools="text")]
    )
    counts = answer_prompts(settings, target, source, tmp_path / "out.jsonl")
    assert counts == {"rows": 3, "whole": 0, "cut": 1, "passed": 0, "rejected": {TEMPLATE_REFUSED: 2}}
    assert lines(tmp_path / "out.jsonl")[0]["answer"] == "42"


def test_rows_that_end_with_a_question_need_answers(tmp_path):
    asked_again = {"messages": [*ANSWERED["conversations"], {"from": "human", "value": "more"}]}
    path = write_jsonl(tmp_path / "p.jsonl", [prompt("tea"), ANSWERED, asked_again, {"messages": []}])
    assert needs_answers(path) == 2
    with pytest.raises(BadParams):
        needs_answers(tmp_path / "nothing.jsonl")


def test_again_makes_the_last_answer_anew_and_leaves_the_earlier_ones(
    tmp_path, target, settings, alone, keep_cut_answers
):
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "old"},
    ]
    source = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns}])
    answer_prompts(settings, target, source, tmp_path / "out.jsonl", again=True)
    [line] = lines(tmp_path / "out.jsonl")
    assert line["messages"][:3] == turns[:3]
    assert line["messages"][3]["content"] == target.tokenizer.decode(alone(turns[:3]), skip_special_tokens=True)


def test_a_restart_goes_on_behind_the_last_whole_line(tmp_path, target, settings, keep_cut_answers):
    rows = [prompt(f"tell me about {number}", id=number) for number in range(12)]
    source, straight, out = write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    answer_prompts(settings, target, source, straight)
    answer_prompts(settings, target, source, out)
    whole = straight.read_bytes().split(b"\n")
    out.write_bytes(b"\n".join(whole[:8]) + b"\n" + whole[8][:20])
    done = []
    generate = answers._generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_generate", lambda model, ids, target: done.extend(ids) or generate(model, ids, target))
        answer_prompts(settings, target, source, out)
    assert out.read_bytes() == straight.read_bytes()
    assert len(done) == 4


def test_a_finished_file_is_left_as_it_is_without_loading_the_target(tmp_path, target, settings, keep_cut_answers):
    source, out = write_jsonl(tmp_path / "p.jsonl", [prompt("tea")]), tmp_path / "out.jsonl"
    first = answer_prompts(settings, target, source, out)
    before = out.stat().st_mtime_ns
    target.load_model = None
    assert answer_prompts(settings, target, source, out) == first
    assert out.stat().st_mtime_ns == before


def test_another_source_or_setting_is_not_mixed_into_the_same_file(
    tmp_path, target, params, settings, keep_cut_answers
):
    source, out = write_jsonl(tmp_path / "p.jsonl", [prompt("tea")]), tmp_path / "out.jsonl"
    answer_prompts(settings, target, source, out)
    with pytest.raises(CheckRefused, match="begun with another answer_tokens"):
        answer_prompts(params(answer_tokens=13), target, source, out)
    with pytest.raises(CheckRefused, match="begun with another source"):
        answer_prompts(settings, target, write_jsonl(source, [prompt("salt")]), out)
    unknown = write_jsonl(tmp_path / "unknown.jsonl", [ANSWERED])
    with pytest.raises(CheckRefused, match=r"unknown\.jsonl is there"):
        answer_prompts(settings, target, source, unknown)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("Tea is hot. Salt is not. And then", "Tea is hot. Salt is not."),
        ('He said "no." Then he', 'He said "no."'),
        ("1. Tea is first here\n2. Salt is second\n3. And", "1. Tea is first here\n2. Salt is second"),
        (
            "It costs 3.50 today, as it did on every day before. 4.",
            "It costs 3.50 today, as it did on every day before.",
        ),
        ("One. And then a long sentence that never comes to its end", None),
        ("no end at all", None),
        ("", None),
        ("It works like this, as everybody knows:\n```python\nprint(1)", "It works like this, as everybody knows:"),
        ("```python\nprint(1)\nprint(2)\npri", "```python\nprint(1)\nprint(2)"),
    ],
)
def test_an_unfinished_answer_is_cut_behind_its_last_whole_sentence_or_line(answer, kept):
    assert cut_at_sentence(answer) == kept
