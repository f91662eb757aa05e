"""The sample table: every accepted conversation as token ids and loss mask, and the account of every row that was read.

    <store folder>/samples/<fingerprint>/samples.safetensors   input_ids int32 [total], loss_mask uint8 [total], offsets int64 [n+1]
                                         samples.jsonl         sample_id, n_tokens, n_supervised, source_line
                                         accounting.json       written last: while it is absent, the table is not there

    rows read = accepted + rejected (by reason) + duplicates      or the stage fails

The fingerprint covers all that decides the ids and masks: tokenizer files, template text, stop ids, max_length and the
data file. Change one and the table gets another folder; nothing old is mixed in or overwritten. Equal tokens are one
sample (sample_id is made of them), so a duplicate is counted and not stored.

Refused before anything is written: a file without a single usable row, and a template that gives the first
conversations no supervised token, because that is one mistake and not thirty-seven thousand.
"""

from pathlib import Path

import numpy as np
import safetensors.numpy

from eagle3_helpers.display import Table
from eagle3_helpers.durable import digest, file_digest, read_json, write_bytes, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import Params
from eagle3_helpers.progress import Progress
from eagle3_helpers.samples.accounting import Accounting, accounting_table
from eagle3_helpers.samples.conversations import Conversation, Rejection, read_conversations
from eagle3_helpers.samples.masks import (
    NOT_STABLE,
    NOT_SUPERVISED,
    TEMPLATE_REFUSED,
    TRUNCATED,
    Sample,
    sample_id,
    template_text,
    tokenize,
)
from eagle3_helpers.target import Target

FIRST = 32  # conversations; if none of them has a supervised token, the rest will not either
WITHOUT_SUPERVISION = {NOT_SUPERVISED, NOT_STABLE, TEMPLATE_REFUSED, TRUNCATED}
PROGRESS_ROWS = 100


class SampleTable:
    """n samples, T tokens in all. Ids and masks of all samples lie one behind the other in `flat_ids`, `flat_mask`."""

    def __init__(self, folder: Path, fingerprint: str, digest: str, arrays: dict[str, np.ndarray], accounting: dict):
        self.folder, self.fingerprint, self.digest, self.accounting = folder, fingerprint, digest, accounting
        self.flat_ids = arrays["input_ids"]  # int32 [T]
        self.flat_mask = arrays["loss_mask"]  # uint8 [T]
        self.offsets = arrays["offsets"]  # int64 [n+1]
        self.lengths = np.diff(self.offsets)  # int64 [n], tokens
        self.sample_ids = [sample_id(self.flat_ids[a:b]) for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        self._rows = {name: row for row, name in enumerate(self.sample_ids)}

    def __len__(self) -> int:
        return len(self.sample_ids)

    def row(self, sample_id: str) -> int:
        return self._rows[sample_id]

    def input_ids(self, sample_id: str) -> np.ndarray:
        """int32 [L]"""
        return self.flat_ids[self._span(sample_id)]

    def loss_mask(self, sample_id: str) -> np.ndarray:
        """uint8 [L]"""
        return self.flat_mask[self._span(sample_id)]

    def _span(self, sample_id: str) -> slice:
        row = self._rows[sample_id]
        return slice(self.offsets[row], self.offsets[row + 1])

    @property
    def tokens(self) -> int:
        return len(self.flat_ids)

    @property
    def supervised(self) -> int:
        return int(self.flat_mask.sum())

    @property
    def pointer(self) -> dict:
        """What a run keeps to find this table again."""
        return {"folder": str(self.folder), "fingerprint": self.fingerprint, "samples": len(self)}

    def table(self) -> Table:
        caption = f"Samples {self.fingerprint}: {self.tokens:,} tokens, {self.supervised:,} of them supervised"
        return accounting_table(self.accounting, caption)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def build_samples(params: Params, target: Target, conversations: Path) -> SampleTable:
    """The table of a conversations file: loaded where an equal one is there, else built.

    Raises BadParams where the file cannot be read, CheckRefused where it gives no sample or the template does not fit,
    StageFailed where the account does not add up.
    """
    conversations = Path(conversations)
    if not conversations.is_file():
        raise BadParams(f"samples.conversations {conversations} is not a file.", "Give an existing JSONL file.")
    fingerprint = sample_fingerprint(params, target, conversations)
    folder = params.store_folder / "samples" / fingerprint
    if (folder / "accounting.json").exists():
        return load_samples(folder)
    return _write(folder, fingerprint, *_read(params, target, conversations))


def sample_fingerprint(params: Params, target: Target, conversations: Path) -> str:
    """16 hex over everything that decides ids and masks."""
    parts = {
        "format": 1,
        "tokenizer": target.tokenizer_digest,
        "template": template_text(target),
        "stop_ids": target.stop_ids,
        "max_length": params.samples.max_length,
        "data": file_digest(conversations),
    }
    return digest(parts)[:16]


def load_samples(folder: Path) -> SampleTable:
    """A table that was built before. Raises CheckRefused where it is incomplete or not what was written."""
    folder = Path(folder)
    record = read_json(folder / "accounting.json")
    if record is None:
        raise CheckRefused(f"{folder} holds no complete sample table.", "Build it again (stage extract).")
    path = folder / "samples.safetensors"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckRefused(
            f"{path} cannot be read: {error.strerror}.", f"Move {folder} aside and build again."
        ) from error
    if digest(content) != record["digest"]:
        raise CheckRefused(
            f"{path} is not what was written ({len(content):,} bytes, another digest).",
            f"Move {folder} aside and build again.",
        )
    return SampleTable(
        folder, record["fingerprint"], record["digest"], safetensors.numpy.load(content), record["accounting"]
    )


class _Samples:
    """Accepted samples while they are read, packed as arrays."""

    def __init__(self):
        self.ids, self.masks, self.lines, self.seen = [], [], [], set()

    def add(self, sample: Sample) -> bool:
        """False, and nothing stored, for a duplicate."""
        name = sample.sample_id
        if name in self.seen:
            return False
        self.seen.add(name)
        self.ids.append(np.array(sample.input_ids, np.int32))
        self.masks.append(np.array(sample.loss_mask, np.uint8))
        self.lines.append(sample.line)
        return True


def _read(params: Params, target: Target, conversations: Path) -> tuple[_Samples, dict]:
    samples, account = _Samples(), Accounting()
    size = conversations.stat().st_size
    reached = tokenized = 0
    with Progress("samples", size, "bytes") as progress:
        for item in read_conversations(conversations):
            account.read += 1
            result = item
            if isinstance(item, Conversation):
                result = tokenize(item, target, params.samples.max_length)
                tokenized += 1
            if isinstance(result, Rejection):
                account.reject(result)
            elif samples.add(result):
                account.accept(result)
            else:
                account.duplicates += 1
            if tokenized == FIRST and isinstance(item, Conversation):
                _require_supervision(account, target)
            if account.read % PROGRESS_ROWS == 0:
                progress.add(item.end - reached, f"{account.accepted:,} accepted")
                reached = item.end
        progress.add(size - reached, f"{account.accepted:,} accepted")
    return samples, _require_samples(account, conversations).close(len(samples.ids))


def _require_supervision(account: Accounting, target: Target) -> None:
    if sum(account.rejected[reason] for reason in WITHOUT_SUPERVISION) == FIRST:
        raise CheckRefused(
            f"the first {FIRST} conversations gave no supervised token with the chat template of {target.folder}: "
            f"{account.reasons(WITHOUT_SUPERVISION)}.",
            f"Does that template belong to this target? For {TRUNCATED!r} raise samples.max_length.",
        )


def _require_samples(account: Accounting, conversations: Path) -> Accounting:
    if not account.read:
        raise CheckRefused(f"{conversations} holds no rows.", "Give a JSONL file with one conversation a line.")
    if not account.accepted:
        raise CheckRefused(
            f"{conversations}: none of {account.read:,} rows gives a sample: {account.reasons(account.rejected)}.",
            "Mend those rows; prompts without an answer are answered by the target first (answers.py).",
        )
    return account


def _write(folder: Path, fingerprint: str, samples: _Samples, accounting: dict) -> SampleTable:
    arrays = {
        "input_ids": np.concatenate(samples.ids),
        "loss_mask": np.concatenate(samples.masks),
        "offsets": np.cumsum([0, *map(len, samples.ids)], dtype=np.int64),
    }
    content = safetensors.numpy.save(arrays)
    table = SampleTable(folder, fingerprint, digest(content), arrays, accounting)
    write_bytes(folder / "samples.safetensors", content)
    supervised = np.add.reduceat(table.flat_mask, table.offsets[:-1], dtype=np.int64)
    records = zip(table.sample_ids, table.lengths.tolist(), supervised.tolist(), samples.lines, strict=True)
    write_bytes(
        folder / "samples.jsonl",
        "".join(
            f'{{"sample_id": "{name}", "n_tokens": {length}, "n_supervised": {count}, "source_line": {line}}}\n'
            for name, length, count, line in records
        ).encode(),
    )
    write_json(
        folder / "accounting.json", {"fingerprint": fingerprint, "digest": table.digest, "accounting": accounting}
    )
    return table
