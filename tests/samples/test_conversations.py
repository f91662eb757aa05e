"""Rows of a conversations file: what is read, what is repaired, what is rejected and why."""

import json

import pytest

from eagle3_helpers.errors import BadParams
from eagle3_helpers.samples.conversations import (
    CUT_AT_SECOND,
    LEADING_DROPPED,
    TRAILING_USER,
    Conversation,
    Rejection,
    read_conversations,
)

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def read(tmp_path, *rows: dict | bytes) -> list:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return list(read_conversations(path))


def read_turns(tmp_path, *turns):
    [item] = read(tmp_path, {"messages": list(turns)})
    return item


def test_both_shapes_come_out_the_same(tmp_path):
    hub = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
    first, second = read(tmp_path, hub, {"messages": [U, A]})
    assert first.messages == second.messages == [U, A]


def test_letter_case_of_roles_is_normalised(tmp_path):
    assert read_turns(tmp_path, {**U, "role": "User"}, {**A, "role": "Assistant"}).messages == [U, A]


def test_an_unknown_role_rejects_the_row_by_name(tmp_path):
    assert read_turns(tmp_path, U, {**A, "role": "bing"}).reason == "unknown role 'bing'"


def test_missing_and_empty_conversations_are_told_apart(tmp_path):
    items = read(tmp_path, {"id": "a", "conversations": []}, {"id": "b", "conversations": None}, {"id": "c"})
    assert [item.reason for item in items] == ["empty conversation", "empty conversation", "no conversation"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "not an object"),
        ({"messages": "hi"}, "conversation is not a list"),
        ({"messages": ["hi"]}, "turn is not an object"),
        ({"messages": [{"content": "hi"}]}, "turn without a role"),
        ({"messages": [{"role": "user", "content": {"text": "hi"}}, A]}, "content is not text"),
        ({"messages": [U, {"role": "assistant", "content": None}]}, "empty assistant turn"),
        ({"messages": [U, {"role": "assistant", "content": " \n"}]}, "empty assistant turn"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
        ({"rejected": "answer reached its limit", "source_line": 3}, "answer reached its limit"),
    ],
)
def test_a_row_that_cannot_be_used_is_rejected_by_name_and_the_others_go_on(tmp_path, row, reason):
    before, bad, after = read(tmp_path, {"messages": [U, A]}, row, {"messages": [U, A]})
    assert isinstance(bad, Rejection)
    assert (bad.line, bad.reason) == (2, reason)
    assert isinstance(before, Conversation) and isinstance(after, Conversation)


def test_bad_utf8_is_rejected_with_line_and_byte_offset(tmp_path):
    items = read(tmp_path, {"messages": [U, A]}, b'{"a": "\xe6bc"}', {"messages": [U, A]})
    assert (items[1].line, items[1].reason, items[1].detail) == (2, "bad UTF-8", "byte 7 of the line is 0xe6")
    assert len(items) == 3


def test_a_whole_surrogate_pair_is_text(tmp_path):
    [item] = read(tmp_path, b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}')
    assert item.messages[0]["content"] == "\N{GRINNING FACE}"


def test_tool_calls_make_an_assistant_turn_without_text_usable(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"t": 1}}}]}
    assert read_turns(tmp_path, U, call).messages[1] == {**call, "content": ""}


def test_arguments_of_different_types_in_two_rows_stay_as_they_are(tmp_path):
    def row(time) -> dict:
        return {"messages": [U, {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"time": time}}]}]}

    items = read(tmp_path, row("2025-08-01"), row(1690876800))
    assert [item.messages[1]["tool_calls"][0]["arguments"]["time"] for item in items] == ["2025-08-01", 1690876800]


def test_lists_of_text_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_turns(tmp_path, {"role": "user", "content": parts}, A).messages[0]["content"] == "ab"


def test_only_a_newline_ends_a_row_and_blank_lines_are_no_rows(tmp_path):
    row = json.dumps({"messages": [{"role": "user", "content": "one\u2028two\x85"}, A]}, ensure_ascii=False).encode()
    items = read(tmp_path, row, b"", b"  \r", row + b"\r")
    assert [(item.line, item.messages[0]["content"]) for item in items] == [
        (1, "one\u2028two\x85"),
        (4, "one\u2028two\x85"),
    ]


def test_a_byte_order_mark_changes_nothing(tmp_path):
    plain = read(tmp_path, {"messages": [U, A]}, {"messages": [U]})
    marked = read(tmp_path, b"\xef\xbb\xbf" + json.dumps({"messages": [U, A]}).encode(), {"messages": [U]})
    assert [item.messages for item in marked] == [item.messages for item in plain]


def test_the_end_of_each_row_counts_every_byte(tmp_path):
    items = read(tmp_path, {"messages": [U, A]}, b"", b"{bad", {"messages": [U]})
    assert items[-1].end == (tmp_path / "rows.jsonl").stat().st_size


@pytest.mark.parametrize(
    ("turns", "left", "repairs"),
    [
        ([A, U, A], [U, A], [LEADING_DROPPED]),
        ([U, A, A], [U, A], [CUT_AT_SECOND]),
        ([U, A, A, U, A], [U, A], [CUT_AT_SECOND]),
        ([U, U, A], [U, U, A], []),
        ([U, A, U], [U, A, U], [TRAILING_USER]),
        ([A, U, A, A], [U, A], [LEADING_DROPPED, CUT_AT_SECOND]),
        ([{"role": "system", "content": ""}, U, A], [{"role": "system", "content": ""}, U, A], []),
    ],
)
def test_turn_order_has_one_rule_a_shape_and_repairs_are_named(tmp_path, turns, left, repairs):
    item = read_turns(tmp_path, *turns)
    assert (item.messages, item.repairs) == (left, repairs)


def test_an_answer_that_nobody_asked_for_is_rejected(tmp_path):
    assert read_turns(tmp_path, A).reason == "no user turn"


def test_a_question_alone_is_a_prompt_without_repairs(tmp_path):
    item = read_turns(tmp_path, U)
    assert item.is_prompt and item.repairs == []


def test_a_field_named_rejected_is_no_rejection(tmp_path):
    [item] = read(tmp_path, {"messages": [U, A], "rejected": "a worse answer", "source_line": 3})
    assert item.messages == [U, A]


def test_a_missing_file_is_refused_before_the_first_row(tmp_path):
    with pytest.raises(BadParams, match=r"nothing\.jsonl cannot be read"):
        read_conversations(tmp_path / "nothing.jsonl")
