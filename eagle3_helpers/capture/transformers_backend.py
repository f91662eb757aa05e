"""Captures the target's hidden states with transformers: forwards over padded batches, boundaries and last state kept.

Padding is on the right, behind every real token of a causal target, and is cut off before anything is stored. Hugging Face
counts `hidden_states[k]` as the residual stream entering layer k, which is h_k here, and its last one is after the final
norm. Samples that are stored already are not asked for again, so a capture may be killed at any moment and resumed.
"""

import torch
import transformers

from eagle3_helpers.errors import StageFailed
from eagle3_helpers.params import Params
from eagle3_helpers.progress import Progress
from eagle3_helpers.states.format import CaptureRecord, Damage, State, check_state
from eagle3_helpers.states.store import Store
from eagle3_helpers.states.writer import StateWriter
from eagle3_helpers.target import Target


def capture_record(params: Params, target: Target) -> CaptureRecord:
    """What a store says about states that `capture` makes."""
    return CaptureRecord(
        target=target.folder.name,
        identity=target.identity,
        backend="transformers",
        backend_version=transformers.__version__,
        flags={"padding": "right", "trust_remote_code": params.target.trust_remote_code},
        boundaries=target.boundaries,
        dtype=params.target.dtype,
        hidden_size=target.shape.hidden_size,
    )


def capture(params: Params, target: Target, store: Store, table, pending: list[str]) -> dict:
    """Captures the samples named by `pending` into `store`.

    Returns samples, tokens, bytes, seconds, tokens_per_second, and `rejected`: samples with NaN or inf (not stored), by name.
    Raises CheckRefused from the writer (full disk), StageFailed where the target does not answer with the states of all layers.
    """
    rejected: list[dict] = []
    # the head is left out: it would give [tokens, vocabulary] logits that nobody reads
    model = target.load_model(params.target.dtype, params.capture.device).base_model if pending else None
    with (
        Progress("capture", len(pending), "samples") as progress,
        StateWriter(store, params.store.writers, params.store.reserve_gb * 1e9) as writer,
    ):
        tokens = 0
        for batch in batches(pending, table, params.capture.batch_tokens):
            for sample_id, state in _forward(model, table, batch, store.record):
                try:
                    check_state(state, store.record)
                    writer.put(sample_id, state.input_ids, state.aux, state.last)
                except Damage as damage:
                    rejected.append({"sample_id": sample_id, "kind": damage.kind, "detail": damage.detail})
                tokens += len(state.input_ids)
            progress.add(len(batch), f"{tokens / progress.seconds:,.0f} tok/s")
    seconds = progress.seconds
    return {
        "samples": writer.samples,
        "tokens": writer.tokens,
        "bytes": writer.bytes,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "rejected": rejected,
    }


def batches(pending: list[str], table, batch_tokens: int) -> list[list[str]]:
    """Samples of similar length together, longest first (what does not fit into memory shows at once).

    A batch's padded size is at most `batch_tokens`; a longer sample goes alone.
    """
    found: list[list[str]] = []
    longest = 0
    for sample_id in sorted(pending, key=lambda name: -int(table.lengths[table.row(name)])):
        if found and (len(found[-1]) + 1) * longest <= batch_tokens:
            found[-1].append(sample_id)
        else:
            found.append([sample_id])
            longest = int(table.lengths[table.row(sample_id)])
    return found


@torch.inference_mode()
def _forward(model, table, batch: list[str], record: CaptureRecord) -> list[tuple[str, State]]:
    """The states of a batch's samples, without padding, in CPU memory of their own."""
    rows = [torch.from_numpy(table.input_ids(sample_id).copy()) for sample_id in batch]
    lengths = torch.tensor([len(row) for row in rows])
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BL = torch.arange(ids_BL.shape[1])[None] < lengths[:, None]
    out = model(
        input_ids=ids_BL.long().to(model.device),
        attention_mask=mask_BL.long().to(model.device),
        output_hidden_states=True,
        use_cache=False,
    )
    layers = len(out.hidden_states or ()) - 1
    if layers < max(record.boundaries) + 1:
        raise StageFailed(
            f"the target answers with {layers + 1} hidden states; boundaries {record.boundaries} need more.",
            "This architecture hides its states from transformers; use another capture backend.",
        )
    states = []
    for row, (sample_id, input_ids) in enumerate(zip(batch, rows, strict=True)):
        length = len(input_ids)
        aux = torch.cat([out.hidden_states[k][row, :length] for k in record.boundaries], dim=-1).cpu()
        last = out.last_hidden_state[row, :length].to("cpu", copy=True)
        states.append((sample_id, State(input_ids, aux, last)))
    return states
