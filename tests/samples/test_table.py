"""The sample table: what it holds, what it refuses, and that its account adds up."""

import json

import numpy as np
import pytest

from eagle3_helpers.errors import BadParams, CheckRefused, StageFailed
from eagle3_helpers.samples.conversations import CUT_AT_SECOND, Conversation, read_conversations
from eagle3_helpers.samples.masks import tokenize
from eagle3_helpers.samples.table import SampleTable, build_samples, load_samples
from tests.makers import make_conversations, write_jsonl

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def test_a_table_holds_the_tokens_of_every_row_under_its_name(tmp_path, params, target):
    path = make_conversations(tmp_path / "conversations.jsonl", 12)
    table = build_samples(params(), target, path)
    samples = [tokenize(item, target, 200) for item in read_conversations(path)]
    assert table.sample_ids == [sample.sample_id for sample in samples]
    for row, sample in enumerate(samples):
        assert table.row(sample.sample_id) == row
        assert table.input_ids(sample.sample_id).tolist() == sample.input_ids
        assert table.loss_mask(sample.sample_id).tolist() == sample.loss_mask
    assert table.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert (table.tokens, table.supervised) == (table.lengths.sum(), sum(sum(s.loss_mask) for s in samples))
    assert (table.flat_ids.dtype, table.flat_mask.dtype, table.offsets.dtype) == (np.int32, np.uint8, np.int64)


def test_the_lines_beside_the_table_name_each_sample(tmp_path, params, target):
    table = build_samples(params(), target, make_conversations(tmp_path / "c.jsonl", 5))
    lines = [json.loads(line) for line in (table.folder / "samples.jsonl").read_text().splitlines()]
    assert lines == [
        {
            "sample_id": name,
            "n_tokens": len(table.input_ids(name)),
            "n_supervised": int(table.loss_mask(name).sum()),
            "source_line": number,
        }
        for number, name in enumerate(table.sample_ids, 1)
    ]


def test_every_row_is_accounted_for(tmp_path, params, target):
    rows = [
        {"messages": [U, A]},
        {"messages": [U, A], "id": "again"},
        {"messages": [U, {**A, "role": "bing"}]},
        {"messages": [U]},
        {"messages": [U, A, {**A, "content": "second"}, U]},
        {"messages": [U, {**A, "content": "no"}, {**A, "content": "second"}]},
        {"messages": []},
        {"messages": [{**U, "content": "x" * 300}, A]},
    ]
    table = build_samples(params(), target, write_jsonl(tmp_path / "c.jsonl", rows))
    assert table.accounting == {
        "read": 8,
        "accepted": 2,
        "rejected": {
            "unknown role 'bing'": 1,
            "no assistant turn": 1,
            "empty conversation": 1,
            "truncated before answer": 1,
        },
        "repaired": {CUT_AT_SECOND: 1},
        "duplicates": 2,
        "rejected_lines": {
            "unknown role 'bing'": [3],
            "no assistant turn": [4],
            "empty conversation": [7],
            "truncated before answer": [8],
        },
    }
    assert "= accepted" in repr(table) and "<td" in table._repr_html_() and "line 3" in repr(table)


def test_a_thousand_bad_rows_keep_twenty_line_numbers(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 3)
    path.write_text(path.read_text() + "{bad\n" * 1000)
    account = build_samples(params(), target, path).accounting
    assert (account["read"], account["rejected"]) == (1003, {"not JSON": 1000})
    assert account["rejected_lines"]["not JSON"] == list(range(4, 24))


def test_an_equal_table_is_loaded_and_not_written_again(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 6)
    first = build_samples(params(), target, path)
    before = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    second = build_samples(params(), target, path)
    assert {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()} == before
    assert (second.digest, second.sample_ids, second.accounting) == (first.digest, first.sample_ids, first.accounting)
    assert load_samples(first.folder).fingerprint == first.fingerprint == first.folder.name


def test_another_length_template_or_data_file_is_another_table(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 6)
    tables = [build_samples(params(), target, path), build_samples(params(max_length=150), target, path)]
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    tables.append(build_samples(params(), target, path))
    tables.append(build_samples(params(), target, make_conversations(path, 7)))
    assert len({table.fingerprint for table in tables}) == 4
    assert all(table.folder.is_dir() for table in tables)


def test_a_table_that_was_interrupted_is_built_again(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 6)
    table = build_samples(params(), target, path)
    (table.folder / "accounting.json").unlink()
    (table.folder / "samples.safetensors").write_bytes(b"half")
    with pytest.raises(CheckRefused, match="no complete sample table"):
        load_samples(table.folder)
    assert build_samples(params(), target, path).digest == table.digest


def test_a_damaged_table_is_refused(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 6)
    file = build_samples(params(), target, path).folder / "samples.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckRefused, match="not what was written"):
        build_samples(params(), target, path)


def test_a_template_that_trains_nothing_stops_after_the_first_conversations(tmp_path, params, target):
    target.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    path = make_conversations(tmp_path / "c.jsonl", 33)
    with pytest.raises(
        CheckRefused, match=r"first 32 .* chat template of .*target: no supervised tokens 32 \(line 1\)"
    ):
        build_samples(params(), target, path)
    assert not (tmp_path / "data").exists()


def test_one_good_conversation_among_the_first_lets_the_rest_go_on(tmp_path, params, target):
    rows = [{"messages": [{**U, "content": f"{n} " + "x" * 300}, A]} for n in range(40)]
    rows[20] = {"messages": [U, A]}
    assert build_samples(params(), target, write_jsonl(tmp_path / "c.jsonl", rows)).accounting["accepted"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no rows"), ("\n\n", "holds no rows"), ("{bad\n", r"none of 1 rows .* not JSON 1 \(line 1\)")],
)
def test_a_file_without_a_sample_is_refused_before_anything_is_written(tmp_path, params, target, text, said):
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(CheckRefused, match=said):
        build_samples(params(), target, tmp_path / "c.jsonl")
    assert not (tmp_path / "data").exists()


def test_prompts_without_answers_are_told_to_be_answered_first(tmp_path, params, target):
    with pytest.raises(CheckRefused, match="no assistant turn 40"):
        build_samples(params(), target, write_jsonl(tmp_path / "c.jsonl", [{"messages": [U]}] * 40))


def test_a_missing_file_is_a_mistake_in_the_params(tmp_path, params, target):
    with pytest.raises(BadParams, match="is not a file"):
        build_samples(params(), target, tmp_path)


def test_an_account_that_does_not_add_up_fails_the_stage(tmp_path, params, target, monkeypatch):
    monkeypatch.setattr("eagle3_helpers.samples.table._Samples.add", lambda self, sample: True)  # accepted, not stored
    with pytest.raises(StageFailed, match="accepted 6, stored 0"):
        build_samples(params(), target, make_conversations(tmp_path / "c.jsonl", 6))


def test_reading_and_tokenizing_again_gives_the_same_bytes(tmp_path, params, target):
    path = make_conversations(tmp_path / "c.jsonl", 6)
    table = build_samples(params(), target, path)
    assert isinstance(table, SampleTable)
    assert all(isinstance(item, Conversation) for item in read_conversations(path))
    other = params().model_copy(update={"store": params().store.model_copy(update={"name": "other"})})
    assert build_samples(other, target, path).digest == table.digest
