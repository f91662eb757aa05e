"""The target answers the prompts itself, so that the draft learns from text that the target would write (on-policy).

The output has one line for each row of the source, in its order, with the row's other fields (id, category ...) kept:
    a row that ends with a question     gets the target's greedy answer as its last turn
    a row that ends with an answer      is passed on as it is; with `again` its last answer is dropped and made anew
    a row that cannot be used           is a line with `source_line` and `rejected`, the reason, instead of a conversation
so the next reader counts every row, and a restart goes on behind the last whole line. Only the last answer of a
conversation is made: earlier ones in a prompt stay those of the source. In bfloat16 the rows that share a batch decide
near-ties, so another batch may give another text, which the target would write just as well.

An answer that reached `answer_tokens` did not end, but every answer of a training sample is followed by the token that
ends a turn. Such an answer is cut behind its last whole sentence or line if that keeps at least half of its characters,
else the row is rejected. After a cut the end of the turn is ours, not the target's. Each row that was answered here says
which it is: `answered` is "whole" or "cut".

Beside the output lies `<name>.origin.json`: what it was made of. Another source, target or setting is refused there.
"""

import re
from itertools import islice
from pathlib import Path

import torch

from eagle3_helpers.durable import append_lines, file_digest, read_json, read_lines, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import Params, resolve
from eagle3_helpers.progress import Progress
from eagle3_helpers.samples.conversations import Conversation, Rejection, is_rejected_line, read_conversations
from eagle3_helpers.samples.masks import TEMPLATE_ERRORS, TEMPLATE_REFUSED, prompt_ids
from eagle3_helpers.target import Target

WINDOW_BATCHES = 4  # rows sorted by length together, and lost at most by a crash
NOT_ENDED = "answer reached its limit"
PROMPT_TOO_LONG = "prompt longer than max_length"
EMPTY_ANSWER = "empty answer"
SENTENCE_END = re.compile(r"(?<=[^\d\s])[.!?][\"'”’)\]*]*(?=\s|$)|\n")  # "3." numbers a list, it ends nothing
OPENED_FENCE = re.compile(r"^```\w+\s*\Z", re.MULTILINE)  # a code block with no line of code in it


def needs_answers(path: Path) -> int:
    """Rows that end with a question. Raises BadParams where the file cannot be read."""
    return sum(isinstance(item, Conversation) and item.is_prompt for item in read_conversations(path))


def answered(params: Params, target: Target, folder: Path) -> Path:
    """The conversations of a run with every prompt answered: the data file itself, or one made in `folder` from it."""
    source = resolve(params.samples.conversations)
    if not source.is_file():
        raise BadParams(f"samples.conversations {source} is not a file.", "Give an existing JSONL file.")
    if not needs_answers(source):
        return source
    out = Path(folder) / "conversations.jsonl"
    answer_prompts(params, target, source, out)
    return out


def answer_prompts(params: Params, target: Target, source: Path, out: Path, again: bool = False) -> dict:
    """Writes `out`, the conversations of `source` with the target's greedy answers; goes on where an earlier call ended.

    Answers are at most `samples.answer_tokens` long and made in batches of `samples.answer_batch` on `capture.device`.
    Returns counts of what `out` holds: rows, whole, cut, passed, rejected by reason. Raises CheckRefused where `out`
    was made of something else.
    """
    total = sum(1 for _ in read_conversations(source))
    _claim(out, params, target, source, again)
    done = sum(1 for _ in read_lines(out))
    if done < total:
        rows = islice(read_conversations(source), done, None)
        with Progress("answers", total, "rows", done) as progress:
            model = _load(params, target)
            while window := list(islice(rows, WINDOW_BATCHES * params.samples.answer_batch)):
                append_lines(out, _answer_window(window, model, params, target, again, progress))
    return _counts(out)


def _claim(out: Path, params: Params, target: Target, source: Path, again: bool) -> None:
    """Records what `out` is made of, or checks that it is the same as before."""
    record = out.with_name(out.name + ".origin.json")
    origin = {
        "source": file_digest(source),
        "target": target.identity,
        "dtype": params.target.dtype,
        "answer_tokens": params.samples.answer_tokens,
        "max_length": params.samples.max_length,
        "again": again,
    }
    before = read_json(record)
    if before is None and out.exists():
        raise CheckRefused(f"{out} is there, but {record.name} is not.", "Move it aside or answer into another file.")
    if before is not None and before != origin:
        other = ", ".join(name for name in origin if before.get(name) != origin[name])
        raise CheckRefused(f"{out} was begun with another {other}.", "Move it aside or answer into another file.")
    if before is None:
        write_json(record, origin)


def _load(params: Params, target: Target):
    from transformers import GenerationConfig

    model = target.load_model(params.target.dtype, params.capture.device)
    # The folder's own generation settings (sampling, penalties) would make the answers other than greedy.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=params.samples.answer_tokens,
        eos_token_id=target.stop_ids,
        pad_token_id=target.stop_ids[0],
    )
    return model


def _answer_window(window: list, model, params: Params, target: Target, again: bool, progress: Progress) -> list[dict]:
    """The lines of some rows of the source, in their order."""
    lines: dict[int, dict] = {}
    prompts: list[tuple[list[int], int, list[dict]]] = []
    for at, item in enumerate(window):
        if isinstance(item, Rejection):
            lines[at] = {"source_line": item.line, "rejected": item.reason, "detail": item.detail}
            continue
        messages = item.messages
        if again and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if messages[-1]["role"] != "user":
            lines[at] = item.row
            continue
        try:
            ids = prompt_ids(messages, target, item.row.get("tools"))
        except TEMPLATE_ERRORS:
            lines[at] = _rejected(item, TEMPLATE_REFUSED)
            continue
        if len(ids) > params.samples.max_length:
            lines[at] = _rejected(item, PROMPT_TOO_LONG)
        else:
            prompts.append((ids, at, messages))
    progress.add(len(lines))
    prompts.sort(key=lambda prompt: len(prompt[0]))
    for start in range(0, len(prompts), params.samples.answer_batch):
        batch = prompts[start : start + params.samples.answer_batch]
        answers = _generate(model, [ids for ids, *_ in batch], target)
        for (_, at, messages), answer in zip(batch, answers, strict=True):
            lines[at] = _line(window[at], messages, *answer)
        tokens = sum(count for *_, count in answers)
        progress.add(len(batch), f"{tokens / len(batch):.0f} tokens an answer")
    return [lines[at] for at in range(len(window))]


@torch.inference_mode()
def _generate(model, prompts: list[list[int]], target: Target) -> list[tuple[str, bool, int]]:
    """For each prompt: the answer, whether the target ended it, and its length in tokens."""
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[target.stop_ids[0]] * (width - len(ids)) + ids for ids in prompts], device=model.device)
    real = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    answers = []
    for row in model.generate(padded, attention_mask=real)[:, width:].tolist():
        stop = next((at for at, token in enumerate(row) if token in target.stop_ids), None)
        tokens = row[:stop]
        answers.append((target.tokenizer.decode(tokens, skip_special_tokens=True), stop is not None, len(tokens)))
    return answers


def _line(conversation: Conversation, messages: list[dict], answer: str, ended: bool, _: int) -> dict:
    whole = answer if ended else cut_at_sentence(answer)
    if whole is None:
        return _rejected(conversation, NOT_ENDED)
    if not whole.strip():
        return _rejected(conversation, EMPTY_ANSWER)
    kept = {key: value for key, value in conversation.row.items() if key not in ("messages", "conversations")}
    return {
        **kept,
        "answered": "whole" if ended else "cut",
        "messages": [*messages, {"role": "assistant", "content": whole}],
    }


def _rejected(conversation: Conversation, reason: str) -> dict:
    kept = {key: conversation.row[key] for key in ("id", "category") if key in conversation.row}
    return {**kept, "source_line": conversation.line, "rejected": reason}


def cut_at_sentence(answer: str) -> str | None:
    """`answer` up to its last whole sentence or line; None where that would drop more than half of its characters."""
    ends = [match.end() for match in SENTENCE_END.finditer(answer)]
    kept = OPENED_FENCE.sub("", answer[: ends[-1]]).rstrip() if ends else ""
    return kept if kept and 2 * len(kept) >= len(answer) else None


def _counts(out: Path) -> dict:
    counts = {"rows": 0, "whole": 0, "cut": 0, "passed": 0, "rejected": {}}
    for row in read_lines(out):
        counts["rows"] += 1
        if is_rejected_line(row):
            counts["rejected"][row["rejected"]] = counts["rejected"].get(row["rejected"], 0) + 1
        else:
            made = row.get("answered")
            counts[made if made in ("whole", "cut") else "passed"] += 1
    return counts
