"""Conversations from a JSONL file, one row at a time: each row becomes a Conversation or a Rejection with its reason.

Rows end at "\\n" and nowhere else (U+2028 inside a string stays there), a byte order mark is accepted, blank lines are no
rows. Two shapes are read and come out the same:

    {"messages":      [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"conversations": [{"from": "human", "value": ...},  {"from": "gpt", "value": ...}]}

Role names are read in any letter case; a role that nobody here knows is a reason to reject the row, never an empty sample.

Turn order, one rule for each shape (u user, a assistant):
    a           rejected: nobody asked
    a u a       the leading answer is dropped                     (a repair)
    u a a ...   cut behind the first of two answers in a row      (a repair)
    u u a       taken as it is
    u a u       the last question stays, nothing in it is trained (noted like a repair)
    u           a prompt: complete only when the target has answered it, see answers.py
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_helpers.errors import BadParams

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
LEADING_DROPPED = "leading assistant turn dropped"
CUT_AT_SECOND = "cut at a second assistant turn in a row"
TRAILING_USER = "trailing user turn kept untrained"


@dataclass(frozen=True)
class Conversation:
    """`messages` hold `role` (system, user, assistant, tool) and `content`, and whatever else the row gave a turn."""

    line: int  # in the file, from 1
    messages: list[dict]
    repairs: list[str] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # as read: id, category, tools ...
    end: int = 0  # byte offset behind the row, for progress

    @property
    def is_prompt(self) -> bool:
        """Whether it ends with a question that nobody has answered."""
        return self.messages[-1]["role"] == "user"


@dataclass(frozen=True)
class Rejection:
    """A row that gives no sample. `reason` is what gets counted, `detail` is for the person who looks at the row."""

    line: int
    reason: str
    detail: str = ""
    end: int = 0


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail


def read_conversations(path: Path) -> Iterator[Conversation | Rejection]:
    """The rows of `path` in order. Raises BadParams, before the first row, where the file cannot be read."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed by the generator below)
    except OSError as error:
        raise BadParams(
            f"samples.conversations {path} cannot be read: {error.strerror}.", "Give an existing JSONL file."
        ) from error
    return _rows(file)


def is_rejected_line(row: dict) -> bool:
    """Whether answers.py wrote this row in place of a conversation (`rejected` alone may be any data set's field)."""
    return (
        isinstance(row.get("rejected"), str) and "source_line" in row and not {"messages", "conversations"} & row.keys()
    )


def _rows(file) -> Iterator[Conversation | Rejection]:
    with file:
        end = 0
        for line, text in enumerate(file, 1):
            end += len(text)
            if line == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            if not text.strip():
                continue
            try:
                row = _parse(text)
                messages, repairs = _in_order(_messages(row))
                yield Conversation(line, messages, repairs, row, end)
            except _Unusable as problem:
                yield Rejection(line, problem.reason, problem.detail, end)


def _parse(text: bytes) -> dict:
    try:
        row = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise _Unusable("bad UTF-8", f"byte {error.start} of the line is 0x{text[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise _Unusable("not JSON", str(error)) from error
    if not isinstance(row, dict):
        raise _Unusable("not an object", f"it is a {type(row).__name__}")
    if is_rejected_line(row):
        raise _Unusable(row["rejected"], "rejected when it was answered")
    if b"\\ud" in text.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _Unusable("lone surrogate", f"\\u{ord(error.object[error.start]):04x} is half a character") from error
    return row


def _messages(row: dict) -> list[dict]:
    """The turns as role and content, whatever the shape of the row."""
    shapes = [name for name in ("messages", "conversations") if name in row]
    if not shapes:
        raise _Unusable("no conversation", f"neither messages nor conversations among {', '.join(row) or 'no keys'}")
    turns = row[shapes[0]]
    if not turns:
        raise _Unusable("empty conversation")
    if not isinstance(turns, list):
        raise _Unusable("conversation is not a list", f"it is a {type(turns).__name__}")
    return [_message(turn) for turn in turns]


def _message(turn) -> dict:
    if not isinstance(turn, dict):
        raise _Unusable("turn is not an object", f"it is a {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str):
        raise _Unusable("turn without a role", f"its keys are {', '.join(turn)}")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise _Unusable(f"unknown role {name[:40]!r}", f"known: {', '.join(ROLES)}")
    content = _text(turn.get("content", turn.get("value")))
    if role == "assistant" and not content.strip() and not turn.get("tool_calls"):
        raise _Unusable("empty assistant turn")
    others = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    return {"role": role, "content": content, **others}


def _text(content) -> str:
    """Text as it is, a list of text parts joined, nothing as an empty text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise _Unusable("content is not text", f"it is a {type(content).__name__}")


def _in_order(messages: list[dict]) -> tuple[list[dict], list[str]]:
    """The turns after the rules of the module's docstring, and the repairs that this took."""
    repairs = []
    asked = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        raise _Unusable("no user turn")
    before = [message for message in messages[:asked] if message["role"] != "assistant"]
    if len(before) < asked:
        repairs.append(LEADING_DROPPED)
    messages = before + messages[asked:]
    for at in range(1, len(messages)):
        if messages[at - 1]["role"] == messages[at]["role"] == "assistant":
            messages = messages[:at]
            repairs.append(CUT_AT_SECOND)
            break
    if messages[-1]["role"] == "user" and any(message["role"] == "assistant" for message in messages):
        repairs.append(TRAILING_USER)
    return messages, repairs
