"""A hidden-state store: a folder whose `store.json` says how everything in it was captured.

    store.json                          the capture record, with its digest
    states/<first 2 hex>/<sample_id>.safetensors
    manifest/<writer>.jsonl             what was stored and what was taken out again
    quarantine/<time>/                  bad files, with reasons
States of two captures never share a store: another record is refused with the names of the fields that differ.
"""

import json
from pathlib import Path

from pydantic import ValidationError

from eagle3_helpers.durable import read_json, write_json
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import FORMAT, SUFFIX, CaptureRecord


class Store:
    """An opened store; made by `open` or `create`."""

    def __init__(self, folder: Path, record: CaptureRecord):
        self.folder, self.record = folder, record

    def __repr__(self) -> str:
        record = self.record
        return f"store {self.folder}: {record.target}, {', '.join(record.slots)} in {record.dtype} by {record.backend}"

    @property
    def states(self) -> Path:
        return self.folder / "states"

    def state_file(self, sample_id: str) -> Path:
        return self.states / sample_id[:2] / f"{sample_id}{SUFFIX}"

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Raises CheckRefused where there is no store, or its store.json is damaged."""
        folder = Path(folder)
        path = folder / "store.json"
        if not path.exists():
            raise CheckRefused(f"{folder} holds no store.json.", "Run 02_extract; or name the store's folder in store.")
        values = read_json(path)
        try:
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise ValueError(f"it is not format {FORMAT}")
            record = CaptureRecord.model_validate_json(json.dumps(values["capture"]))
            if record.digest != values["digest"]:
                raise ValueError("its digest does not fit what it says")
        except (KeyError, ValueError, ValidationError) as error:
            raise CheckRefused(
                f"{path} ({path.stat().st_size} bytes) is damaged: {' '.join(str(error).split())[:200]}.",
                "Move it aside and run 02_extract: it writes the record again if the files here were made under it.",
            ) from error
        return cls(folder, record)

    @classmethod
    def create(cls, folder: Path, record: CaptureRecord) -> "Store":
        """Opens the store of `record` at `folder`, making it where there is none.

        Raises CheckRefused where the folder above does not exist (a volume that is not mounted would fill the root
        disk), cannot be written, or where a store of another record is there.
        """
        folder = Path(folder)
        if (folder / "store.json").exists():
            store = cls.open(folder)
            _refuse_other(folder, store.record, record)
            return store
        if not folder.parent.is_dir():
            raise CheckRefused(f"data root {folder.parent} does not exist.", "Mount the volume, or make that folder.")
        store = cls(folder, record)
        _refuse_foreign_files(store)
        try:
            store.states.mkdir(parents=True, exist_ok=True)
            write_json(
                folder / "store.json",
                {"format": FORMAT, "digest": record.digest, "capture": record.model_dump(mode="json")},
            )
        except OSError as error:
            raise CheckRefused(
                f"{folder} cannot be written: {error.strerror}.",
                "Check the mount and its owner, or change store.data_root.",
            ) from error
        return store


def _refuse_other(folder: Path, there: CaptureRecord, wanted: CaptureRecord) -> None:
    old, new = there.model_dump(mode="json"), wanted.model_dump(mode="json")
    changed = [name for name in old if old[name] != new[name]]
    if changed:
        values = "; ".join(f"{name} is {_short(old[name])}, now {_short(new[name])}" for name in changed)
        raise CheckRefused(
            f"{folder} was captured differently: {values}.",
            "Give this capture a store of its own (store.name), or undo that change.",
        )


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_foreign_files(store: Store) -> None:
    """A store that lost its store.json gets it back only under the record that one of its files names."""
    from safetensors import SafetensorError, safe_open

    for path in store.states.glob(f"??/*{SUFFIX}"):
        try:
            with safe_open(path, "pt") as file:
                made_by = file.metadata()["capture"]
        except (SafetensorError, OSError, KeyError, TypeError):
            continue  # a damaged file says nothing; the next one may
        if made_by != store.record.digest:
            raise CheckRefused(
                f"{store.folder} has lost its store.json, and {path.name} was made under another capture ({made_by[:12]}).",
                "Use another store.name, or bring store.json back from a copy.",
            )
        return
