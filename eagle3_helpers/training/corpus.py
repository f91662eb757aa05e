"""The stored states as documents: checked against the spec once, read one step ahead while the present step computes.

The spec's digest of the manifest binds the listed hash of every file, and each file's bytes are held against that hash as
they are read: what is trained on is what was verified, whenever the disk or a stranger changed it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from eagle3_helpers.durable import file_digest
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.samples.vocab import load_draft_vocab
from eagle3_helpers.states.format import Damage, decode_state, read_content
from eagle3_helpers.states.manifest import manifest_digest, read_manifest
from eagle3_helpers.states.store import Store
from eagle3_helpers.training.batches import Document, steps_per_epoch
from eagle3_helpers.training.spec import TrainingSpec

DAMAGED = "Run 03_verify: it names every damaged file, 01_recover moves them away and 02_extract captures them again."
AGAIN = "Run 03_verify and 04_inspect_freeze again: what was approved is not what is there now."


class Corpus:
    """Samples, store and draft vocabulary of a spec.

    Raises CheckRefused where one of their digests is not the spec's, a sample has no stored states, or the number of steps differs.
    """

    def __init__(self, spec: TrainingSpec):
        self.store = Store.open(Path(spec.store))
        self.table = load_samples(Path(spec.samples))
        self.draft_vocab = load_draft_vocab(Path(spec.draft_vocab))
        found = {
            "states": (manifest_digest(self.store, self.table.sample_ids), spec.manifest_digest),
            "samples": (self.table.digest, spec.samples_digest),
            "draft vocabulary": (file_digest(Path(spec.draft_vocab)), spec.draft_vocab_digest),
        }
        wrong = [f"{name} {now[:12]}, plan {then[:12]}" for name, (now, then) in found.items() if now != then]
        if wrong:
            raise CheckRefused(f"digests differ from the plan's: {'; '.join(wrong)}.", AGAIN)
        self.held_out = spec.held_out
        self.train = [name for name in self.table.sample_ids if name not in set(spec.held_out)]
        self.listed = read_manifest(self.store)
        missing = [name for name in self.table.sample_ids if name not in self.listed]
        if missing:
            raise CheckRefused(
                f"{len(missing):,} of {len(self.table):,} samples have no stored states, e.g. {', '.join(missing[:3])}.",
                "Run 02_extract: it captures what is missing.",
            )
        steps = steps_per_epoch(len(self.train), spec.training.samples_per_step)
        if steps != spec.steps_per_epoch or len(self.train) + len(spec.held_out) != len(self.table):
            raise CheckRefused(
                f"{len(self.train):,} training samples make {steps:,} steps an epoch, the plan says {spec.steps_per_epoch:,}.",
                AGAIN,
            )

    def load(self, sample_ids: list[str]) -> list[Document]:
        """Raises CheckRefused naming a file that is not as listed, of another capture, or of other tokens than the table's."""
        return [self._document(name) for name in sample_ids]

    def _document(self, name: str) -> Document:
        path = self.store.state_file(name)
        try:
            content = read_content(path)
            found, listed = xxhash.xxh3_128_hexdigest(content), self.listed[name].xxh3
            if found != listed:
                raise Damage("checksum mismatch", f"xxh3 is {found}, listed as {listed}")
            state = decode_state(content, name, self.store.record.digest)
            if not torch.equal(state.input_ids, torch.from_numpy(self.table.input_ids(name).copy())):
                raise Damage("wrong tokens", "other ones than in the sample table")
        except Damage as damage:
            raise CheckRefused(f"{path} may not be trained on, {damage.kind}: {damage.detail}.", DAMAGED) from damage
        mask = torch.from_numpy(self.table.loss_mask(name).copy())
        return Document(name, state.input_ids, mask, state.aux, state.last)

    def ahead(self, steps: Iterator[list[str]]) -> Iterator[list[Document]]:
        """Documents of each step in turn; one thread reads the next step's meanwhile."""
        with ThreadPoolExecutor(1) as reader:
            waiting = None
            for sample_ids in steps:
                coming = reader.submit(self.load, sample_ids)
                if waiting is not None:
                    yield waiting.result()
                waiting = coming
            if waiting is not None:
                yield waiting.result()
