"""Evaluation prompts: a JSONL of `turns` and `category` (the layout of Spec-Bench), as the token ids the target gets.

Only the first turn of a row is asked: a second turn needs the first answer, which differs from model to model. Ids come
from the function that renders the training samples, so training and evaluation cannot disagree about the template. A file
that cannot be meant as written is refused with the line numbers; nothing is skipped in silence.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.samples.masks import prompt_ids
from eagle3_helpers.target import Target

SHOWN = 5  # bad lines named in one refusal


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row: `prompt_id` is its question_id, or `line-N` where it has none."""

    prompt_id: str
    category: str
    text: str
    input_ids: tuple[int, ...]


def read_prompts(path: Path, target: Target) -> list[Prompt]:
    """Every prompt of the file, in its order, with the ids of its first turn.

    Raises BadParams where the file is missing, CheckRefused where it is empty, a line is wrong or an id comes twice.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise BadParams(
            f"evaluation.prompts {path} cannot be read: {error.strerror}.", "Give a JSONL file of turns and category."
        ) from error
    except UnicodeDecodeError as error:
        raise CheckRefused(f"{path} is not UTF-8 ({error.reason} at byte {error.start}).", "Convert it.") from error
    rows, wrong, seen = [], [], {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row, reason = _parse(line)
        if not reason:
            prompt_id = str(row.get("question_id", f"line-{number}"))
            first = seen.setdefault(prompt_id, number)
            reason = f"question_id {prompt_id} is that of line {first}" if first != number else ""
        if reason:
            wrong.append(f"line {number}: {reason}")
        else:
            rows.append((prompt_id, row["category"], row["turns"][0]))
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckRefused(
            f"{path}, {'; '.join(wrong[:SHOWN])}{more}.",
            'A line is like {"question_id": 1, "category": "code", "turns": ["..."]}.',
        )
    if not rows:
        raise CheckRefused(f"{path} holds no prompts.", "Give a JSONL file of turns and category.")
    return [
        Prompt(name, category, text, tuple(prompt_ids([{"role": "user", "content": text}], target)))
        for name, category, text in rows
    ]


def _parse(line: str) -> tuple[dict, str]:
    """The row, and what is wrong with it ("" if nothing)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return {}, f"not JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"a {type(row).__name__}, not an object"
    turns, category = row.get("turns"), row.get("category")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return row, f"`turns` is {json.dumps(turns)[:60]}, not a list of texts"
    if not isinstance(category, str) or not category:
        return row, f"`category` is {json.dumps(category)[:60]}, not a name"
    return row, ""


def choose_prompts(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit`, dealt to the categories in turn, each giving its next in file order; returned in file order."""
    waiting: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        waiting.setdefault(prompt.category, []).append(place)
    rounds = max(len(places) for places in waiting.values()) if waiting else 0
    dealt = [places[turn] for turn in range(rounds) for places in waiting.values() if turn < len(places)]
    return [prompts[place] for place in sorted(dealt[:limit])]


def trained_on(prompts: list[Prompt], samples) -> set[str]:
    """Ids of the prompts whose token ids begin a sample of the SampleTable `samples`: the draft may know their answers."""
    wanted: dict[int, dict[bytes, list[str]]] = {}  # bytes of the ids -> prompt ids, by length in bytes
    for prompt in prompts:
        ids = np.asarray(prompt.input_ids, np.int32).tobytes()
        wanted.setdefault(len(ids), {}).setdefault(ids, []).append(prompt.prompt_id)
    found: set[str] = set()
    for sample_id in samples.sample_ids:
        sample = np.asarray(samples.input_ids(sample_id), np.int32).tobytes()
        for length, known in wanted.items():
            if length <= len(sample):
                found.update(known.get(sample[:length], ()))
    return found
