"""Files are whole or absent, and line files survive a torn tail."""

import errno
import json
import os

import pytest

from eagle3_helpers import durable
from eagle3_helpers.errors import CheckRefused


def test_a_file_is_replaced_whole_and_no_temporary_is_left(tmp_path):
    path = tmp_path / "new folder" / "a.json"
    durable.write_json(path, {"a": 1})
    durable.write_json(path, {"a": 2})
    assert durable.read_json(path) == {"a": 2}
    assert os.listdir(path.parent) == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "a"
    durable.write_bytes(path, b"old")

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        durable.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_torn_last_line_is_dropped_and_the_next_one_does_not_glue_on(tmp_path):
    path = tmp_path / "log.jsonl"
    durable.append_lines(path, [{"id": n} for n in range(41)])
    with open(path, "ab") as file:
        file.write(b'{"id": 41, "sha": "ab')
    assert len(list(durable.read_lines(path))) == 41
    durable.append_lines(path, [{"id": 41}])
    assert [record["id"] for record in durable.read_lines(path)] == list(range(42))


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * 200_000)
    durable.append_lines(path, [{"id": 0}])
    assert path.read_bytes() == b'{"id": 0}\n'


def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 0}\n{"id": \n{"id": 2}\n')
    with pytest.raises(CheckRefused, match="line 2"):
        list(durable.read_lines(path))


def test_equal_content_has_equal_digests_whatever_the_order_of_keys():
    assert durable.digest({"b": [1, "é"], "a": None}) == durable.digest(json.loads('{"a": null, "b": [1, "\\u00e9"]}'))
    assert durable.digest({"a": 1}) != durable.digest({"a": 2})


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_damaged_json_file_reads_as_none(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert durable.read_json(tmp_path / "a") is None
    assert durable.read_json(tmp_path / "absent") is None
