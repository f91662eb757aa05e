"""Checkpoints: whole or not at all, proved by hashes, and never fewer good ones than asked for.

    checkpoints/step-000040/draft.safetensors       weights, float32, without the embedding (it is the target's)
                            optimizer.safetensors   moments, float32
                            state.json              plain values: step, counts, spec and its digest
                            complete.json           sha256 of the three, written last: without it the folder is not a checkpoint
                aside/                              what was passed over when a run was resumed; nothing there is deleted by us

A checkpoint counts if its marker is there and every hash holds. The newest by step number is resumed from. Older ones are removed only
after the new one was read back, only from this folder, and only if they carry a marker.
"""

import dataclasses
import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from eagle3_helpers.draft.model import DraftConfig
from eagle3_helpers.durable import digest, file_digest, read_json, sync_folder, write_bytes, write_json
from eagle3_helpers.errors import CheckRefused, StageFailed

NAME = re.compile(r"step-(\d{6,})")
MARKER = "complete.json"
LAUNCH_AGAIN = (
    "Run the cells of 05_train again: its launch needs a new approval, goes on from the newest whole checkpoint, "
    "and takes that one where nothing is left to train."
)
FILES = ("draft.safetensors", "optimizer.safetensors", "state.json")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    state: dict

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "draft.safetensors")

    def moments(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "optimizer.safetensors")


class Checkpoints:
    """The checkpoints of one training run under `folder`."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, weights: dict, moments: dict, state: dict) -> Checkpoint:
        """Writes, syncs and reads back.

        Raises StageFailed where the disk does not take it: the older ones are untouched, and what this call wrote is removed.
        """
        folder = self.path(step)
        ours = not folder.exists()
        try:
            digests = {}
            for name, tensors in (("draft.safetensors", weights), ("optimizer.safetensors", moments)):
                content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
                write_bytes(folder / name, content)
                digests[name] = digest(content)
                del content
            write_json(folder / "state.json", state)
            digests["state.json"] = file_digest(folder / "state.json")
            write_json(folder / MARKER, {"step": step, "sha256": digests})
            sync_folder(self.folder)
        except OSError as error:
            if ours and not (folder / MARKER).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise StageFailed(
                f"checkpoint {folder} could not be written: {error.strerror}.",
                "Make room on that volume and start again: training resumes from the checkpoint before.",
            ) from error
        wrong = damage(folder)
        if wrong:
            raise StageFailed(
                f"checkpoint {folder} does not read back as written: {wrong}.", "Check that volume before you go on."
            )
        return Checkpoint(folder, step, state)

    def listing(self) -> list[tuple[str, str]]:
        """(folder name, why it is not whole or ""), newest first. Reads and hashes every file."""
        return [(folder.name, damage(folder)) for _, folder in sorted(self._folders(), reverse=True)]

    def newest(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest whole checkpoint by number, and the newer ones passed over with the reason."""
        passed = []
        for step, folder in sorted(self._folders(), reverse=True):
            wrong = damage(folder)
            if not wrong:
                return Checkpoint(folder, step, read_json(folder / "state.json")), passed
            passed.append((folder, wrong))
        return None, passed

    def newest_spec(self) -> dict | None:
        """The spec that the newest complete checkpoint was trained by, without reading the large files; None without one."""
        for _, folder in sorted(self._folders(), reverse=True):
            state = read_json(folder / "state.json")
            if (folder / MARKER).is_file() and isinstance(state, dict):
                return state.get("spec")
        return None

    def set_aside(self, folder: Path) -> Path:
        """Moves a folder that was passed over to aside/, out of the way of the checkpoint that will take its name."""
        aside = self.folder / "aside" / f"{folder.name}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        aside.parent.mkdir(exist_ok=True)
        os.rename(folder, aside)
        sync_folder(self.folder)
        return aside

    def prune(self, keep: int, best: int | None) -> list[int]:
        """Removes all but the newest `keep` and the best; returns the steps removed. Folders without a marker stay."""
        marked = sorted(step for step, folder in self._folders() if (folder / MARKER).is_file())
        gone = [step for step in marked[:-keep] if step != best]
        for step in gone:
            (self.path(step) / MARKER).unlink()  # first, so that half a removal does not look like a checkpoint
            shutil.rmtree(self.path(step))
        return gone

    def _folders(self) -> list[tuple[int, Path]]:
        found = self.folder.iterdir() if self.folder.is_dir() else []
        named = [(NAME.fullmatch(path.name), path) for path in found if path.is_dir()]
        return [(int(match[1]), path) for match, path in named if match]


def load_result(training_folder: Path) -> tuple[dict[str, torch.Tensor], DraftConfig]:
    """Weights (float32, without the embedding) and config of the best checkpoint of a finished training.

    Raises CheckRefused where there is no result, or its checkpoint is damaged or another one.
    """
    result = read_json(Path(training_folder) / "result.json")
    if not result:
        raise CheckRefused(f"{training_folder} holds no result.json.", "Run 05_train to its end.")
    folder = Path(training_folder) / result["checkpoint"]
    wrong = chosen_damage(training_folder, result)
    if wrong:
        raise CheckRefused(f"checkpoint {folder} is not what was chosen: {wrong}.", LAUNCH_AGAIN)
    chosen = Checkpoint(folder, result["step"], read_json(folder / "state.json"))
    return chosen.weights(), DraftConfig.from_dict(chosen.state["spec"]["draft"])


def finished_result(training_folder: Path, spec_digest: str) -> dict | None:
    """result.json, if it is of this spec and the checkpoint it names is whole and still the one that was chosen."""
    result = read_json(Path(training_folder) / "result.json")
    if not result or result["spec_digest"] != spec_digest or chosen_damage(training_folder, result):
        return None
    return result


def chosen_damage(training_folder: Path, result: dict) -> str:
    """Why the checkpoint that `result` names is not the whole one that was chosen; empty if it is."""
    folder = Path(training_folder) / result["checkpoint"]
    wrong = damage(folder)
    if wrong:
        return wrong
    found = read_json(folder / MARKER)["sha256"]["draft.safetensors"]  # just seen to be that of the file
    if found != result["draft_digest"]:
        return f"draft.safetensors has sha256 {found[:12]}, result.json says {result['draft_digest'][:12]}"
    return ""


def damage(folder: Path) -> str:
    """Why `folder` is not a whole checkpoint; empty if it is one. Reads and hashes every file."""
    marker = read_json(folder / MARKER)
    if marker is None:
        return f"no readable {MARKER}: its writing was cut short"
    for name in FILES:
        try:
            found = file_digest(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != marker["sha256"].get(name):
            return f"{name} is not what was written (sha256 {found[:12]})"
    return ""
