"""Format 1 of a stored state: what one file holds, how it is written, and what is refused when it is read back.

A file is safetensors with `input_ids` int32 [L], `aux` [L, 3H] (the captured boundaries h_k side by side, lowest first) and
`last` [L, H] (after the target's final norm), and names in its header the sample, the format and the capture record that
made it. Equal states are equal bytes. A file that does not decode is "corrupt", however it came to be so: the readers'
messages for the seven common ways differ, so no text is ever matched.
"""

import dataclasses
import errno
import functools
import json
import time
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch

from eagle3_helpers.durable import digest
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.params import Positive, Section

FORMAT = "1"
SUFFIX = ".safetensors"


class CaptureRecord(Section):
    """What decides the numbers in a store, and nothing that depends on the machine."""

    target: str  # name of its folder
    identity: dict  # digests of its config, weights, tokenizer and template
    backend: str
    backend_version: str
    flags: dict
    boundaries: list[int]  # h_k, the residual stream entering layer k
    last_is_post_norm: Literal[True] = True
    dtype: Literal["bfloat16", "float16", "float32"]
    hidden_size: Positive

    @functools.cached_property
    def digest(self) -> str:
        return digest(self.model_dump(mode="json"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def slots(self) -> list[str]:
        """Names of the stored blocks, in order: h_2, h_15, h_27, last."""
        return [*(f"h_{k}" for k in self.boundaries), "last"]


@dataclasses.dataclass(frozen=True)
class State:
    """One sample's states."""

    input_ids: torch.Tensor  # int32 [L]
    aux: torch.Tensor  # [L, 3H]
    last: torch.Tensor  # [L, H]


class Damage(Exception):
    """Why a state may not be used: a class of damage and the value that shows it. Stays inside the package."""

    def __init__(self, kind: str, detail: str):
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


def check_state(state: State, record: CaptureRecord) -> None:
    """Raises Damage unless every token has its states, in the record's width and dtype, all finite."""
    tokens = len(state.input_ids)
    width = record.hidden_size
    for name, tensor, columns in (("aux", state.aux, len(record.boundaries) * width), ("last", state.last, width)):
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype != record.torch_dtype:
            expected = f"[{tokens}, {columns}] {record.torch_dtype}"
            raise Damage("wrong shape", f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {expected}")
        if len(tensor) != tokens:
            raise Damage("wrong length", f"{name} has states for {len(tensor)} of {tokens} tokens")
    if state.input_ids.ndim != 1 or state.input_ids.dtype != torch.int32:
        raise Damage("wrong shape", f"input_ids is {list(state.input_ids.shape)} {state.input_ids.dtype}")
    for name, tensor in (("aux", state.aux), ("last", state.last)):
        if (
            tokens and not (tensor.amax(dim=1).isfinite() & tensor.amin(dim=1).isfinite()).all()
        ):  # 10 x isfinite's speed
            rows = (~torch.isfinite(tensor)).any(dim=1).nonzero().flatten().tolist()
            raise Damage("non-finite", f"{name} has NaN or inf in {len(rows)} rows, first {rows[0]}")


def encode_state(state: State, sample_id: str, record_digest: str) -> bytes:
    """The bytes of the file. The library writes the header's names in random order; here they are sorted."""
    tensors = {"input_ids": state.input_ids, "aux": state.aux, "last": state.last}
    content = safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        {"sample_id": sample_id, "format": FORMAT, "capture": record_digest},
    )
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    return b"".join((content[:8], text, memoryview(content)[end:]))


def decode_state(content: bytes, sample_id: str, capture: str) -> State:
    """The state in `content`. Raises Damage: corrupt, wrong capture, or wrong tokens (the header names another sample)."""
    try:
        tensors = safetensors.torch.load(content)
        state = State(tensors.pop("input_ids"), tensors.pop("aux"), tensors.pop("last"))
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        named, made_by, version = header["sample_id"], header["capture"], header["format"]
    except Exception as error:  # whatever the readers raise on bytes that are no state, it is one class to us
        raise Damage(
            "corrupt", f"{len(content):,} bytes do not decode ({' '.join(str(error).split())[:120]})"
        ) from error
    if tensors or version != FORMAT:
        raise Damage("corrupt", f"format {version} with extra tensors {sorted(tensors)}, expected format {FORMAT}")
    if made_by != capture:
        raise Damage("wrong capture", f"made under capture {made_by[:12]}, this store is {capture[:12]}")
    if named != sample_id:
        raise Damage("wrong tokens", f"the file holds sample {named}")
    return state


def read_content(path: Path, tries: int = 3) -> bytes:
    """A file's bytes. Network filesystems may answer ENOENT or ESTALE just after a rename, so those are asked again.

    Raises Damage: missing or unreadable.
    """
    for left in reversed(range(tries)):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            again = error.errno in (errno.ENOENT, errno.ESTALE)
            if not again or not left:
                raise Damage("missing" if again else "unreadable", f"{path}: {error.strerror}") from error
            time.sleep(0.02)
    raise AssertionError("unreachable")


def read_state(path: Path, expect_capture: str) -> State:
    """The state at `path`, which names its sample. Raises CheckRefused naming the file where it may not be used."""
    path = Path(path)
    try:
        return decode_state(read_content(path), path.name.removesuffix(SUFFIX), expect_capture)
    except Damage as damage:
        raise CheckRefused(
            f"{path} may not be used, {damage.kind}: {damage.detail}.",
            "Run 01_recover (it moves bad files to quarantine), then 02_extract for what is missing.",
        ) from damage
