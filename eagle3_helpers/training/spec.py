"""Everything the trainer reads: `plan["spec"]`. What is not in here cannot change a training run.

Paths say where things are, digests say what they must be. The digest of the spec binds checkpoints to it: a checkpoint of another spec is
not resumed from.
"""

from pathlib import Path

from pydantic import ValidationError

from eagle3_helpers.draft.model import Draft, DraftConfig
from eagle3_helpers.durable import digest, file_digest
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.params import Params, Positive, Section, TargetParams, TrainingParams
from eagle3_helpers.samples.table import SampleTable
from eagle3_helpers.samples.vocab import DraftVocab
from eagle3_helpers.states.manifest import manifest_digest
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target
from eagle3_helpers.training.batches import hold_out, steps_per_epoch


class TrainingSpec(Section):
    folder: str  # the training folder: process.json, lock, log.txt, metrics.jsonl, checkpoints/, result.json
    target: TargetParams
    store: str  # folder
    samples: str  # folder of the sample table
    draft_vocab: str  # file
    manifest_digest: str  # of the states of these samples; others in the store do not count
    samples_digest: str
    draft_vocab_digest: str  # sha256 of the file
    draft: dict  # DraftConfig
    freeze_lm_head: bool
    training: TrainingParams
    steps_per_epoch: Positive
    optimizer_steps: Positive
    held_out: list[str]  # sample ids

    @property
    def digest(self) -> str:
        return digest(self.model_dump(mode="json"))


def make_spec(
    params: Params, training_folder: Path, table: SampleTable, draft_vocab: Path, config: DraftConfig
) -> TrainingSpec:
    """The spec of training `config` on all samples of `table` but the held-out ones."""
    training = params.training
    held_out = hold_out(table.sample_ids, training.held_out_fraction)
    steps = steps_per_epoch(len(table) - len(held_out), training.samples_per_step)
    return TrainingSpec(
        folder=str(training_folder),
        target=params.target,
        store=str(params.store_folder),
        samples=str(table.folder),
        draft_vocab=str(draft_vocab),
        manifest_digest=manifest_digest(Store.open(params.store_folder), table.sample_ids),
        samples_digest=table.digest,
        draft_vocab_digest=file_digest(draft_vocab),
        draft=config.to_dict(),
        freeze_lm_head=params.draft.freeze_lm_head,
        training=training,
        steps_per_epoch=steps,
        optimizer_steps=steps * training.epochs,
        held_out=held_out,
    )


def untrained_draft(config: DraftConfig, target: Target, draft_vocab: DraftVocab, seed: int) -> Draft:
    """The draft as it is before the first optimizer step, on the CPU: where training starts, and what it is compared with."""
    return Draft(config).initialise(target, draft_vocab, seed)


def read_spec(plan: dict) -> TrainingSpec:
    """Raises CheckRefused where the plan has no spec, or one of another version."""
    try:
        return TrainingSpec.model_validate(plan["spec"])
    except (KeyError, TypeError) as error:
        raise CheckRefused("the plan holds no training spec.", "Make the plan again (notebook 04).") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckRefused(
            f"the plan's training spec cannot be read: {wrong}.", "Make the plan again (notebook 04)."
        ) from error
