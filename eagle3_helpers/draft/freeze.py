"""What of the draft trains and what is frozen: the policy, the table a person approves, and the proof on real rows.

Policy: the embedding is the target's and stays frozen, because the server puts the target's in its place anyway. Everything else
trains. `freeze_lm_head` also freezes the head at the target's rows, as the speculators library does; SpecForge trains it.

The table is made on the meta device: no memory, any size. The certificate runs one backward and one optimizer step on a copy of the
draft: every trainable tensor must get a finite gradient that is not zero, no frozen tensor may get one or change a bit.
"""

import copy
import dataclasses
import hashlib
import html
from collections.abc import Callable
from pathlib import Path

import torch

from eagle3_helpers.display import Checks, Table, bytes_text
from eagle3_helpers.draft.model import EMBEDDING, Draft, DraftConfig
from eagle3_helpers.durable import write_json, write_text
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.params import DraftParams

HEAD = "lm_head.weight"
FLOAT32 = 4  # bytes

COMPONENTS = {
    "embed_tokens": ("embedding", "target", "the target's own; a server replaces it with the target's anyway"),
    "fc": ("fusion", "random", "maps three boundaries of the target to one hidden"),
    "midlayer.self_attn": ("attention", "random", "reads embedding and hidden side by side"),
    "midlayer.mlp": ("MLP", "random", "the layer's own knowledge"),
    "midlayer": ("norms", "ones", "scale what enters attention and MLP"),
    "norm": ("norms", "1 / head row norm", "scales what enters the head; at first so that logits spread by 1"),
    "lm_head": ("head", "target rows", "starts as the target's rows of the draft vocabulary"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    component: str
    tensor: str
    shape: list[int]
    count: int
    dtype: str
    trainable: bool
    in_optimizer: bool
    origin: str  # where its first values come from: target, target rows, random, ones, 1 / head row norm
    why: str


@dataclasses.dataclass(frozen=True)
class FreezeTable:
    rows: list[Row]

    @property
    def trainable(self) -> int:
        return sum(row.count for row in self.rows if row.trainable)

    @property
    def frozen(self) -> int:
        return sum(row.count for row in self.rows if not row.trainable)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the training device, without activations. Weights are float32 and so are their own master copy."""
        return {
            "weights": FLOAT32 * (self.trainable + self.frozen),
            "gradients": FLOAT32 * self.trainable,
            "moments": 2 * FLOAT32 * self.trainable,
        }

    def to_dict(self) -> dict:
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "trainable": self.trainable,
            "frozen": self.frozen,
            "memory": self.memory,
        }

    def save(self, folder: Path) -> None:
        """freeze_table.json and freeze_table.html in `folder`."""
        write_json(Path(folder) / "freeze_table.json", self.to_dict())
        write_text(Path(folder) / "freeze_table.html", self._repr_html_())

    def table(self) -> Table:
        rows = [
            [
                row.component,
                row.tensor,
                " x ".join(f"{size}" for size in row.shape),
                row.count,
                row.dtype,
                "trains" if row.trainable else "FROZEN",
                row.in_optimizer,
                row.origin,
                row.why,
            ]
            for row in self.rows
        ]
        headings = [
            "component",
            "tensor",
            "shape",
            "parameters",
            "dtype",
            "policy",
            "in optimizer",
            "starts from",
            "why",
        ]
        return Table(headings, rows, "What trains and what is frozen")

    @property
    def summary(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(count)}" for name, count in self.memory.items())
        return f"trainable {self.trainable:,}; frozen {self.frozen:,}; memory: {parts}"

    def __repr__(self) -> str:
        return f"{self.table()!r}\n{self.summary}"

    def _repr_html_(self) -> str:
        return f"{self.table()._repr_html_()}<p>{html.escape(self.summary)}</p>"


def apply_policy(draft: Draft, freeze_lm_head: bool) -> Draft:
    """Sets which weights take gradients; returns the draft."""
    frozen = {EMBEDDING, HEAD} if freeze_lm_head else {EMBEDDING}
    for name, weight in draft.named_parameters():
        weight.requires_grad_(name not in frozen)
    return draft


def freeze_table(config: DraftConfig, params: DraftParams) -> FreezeTable:
    """The table of a draft of this config. Raises CheckRefused where its totals are not the ones the params expect."""
    draft = apply_policy(Draft(config, device="meta"), params.freeze_lm_head)
    rows = []
    for name, weight in draft.named_parameters():
        component, origin, why = next(COMPONENTS[key] for key in _prefixes(name) if key in COMPONENTS)
        if name == HEAD and params.freeze_lm_head:
            why = "kept at the target's rows of the draft vocabulary (draft.freeze_lm_head)"
        rows.append(
            Row(
                component=component,
                tensor=name,
                shape=list(weight.shape),
                count=weight.numel(),
                dtype=str(weight.dtype).removeprefix("torch."),
                trainable=weight.requires_grad,
                in_optimizer=weight.requires_grad,
                origin=origin,
                why=why,
            )
        )
    table = FreezeTable(rows)
    for kind, expected, found in (
        ("trainable", params.expect_trainable, table.trainable),
        ("frozen", params.expect_frozen, table.frozen),
    ):
        if expected is not None and expected != found:
            raise CheckRefused(
                f"{found:,} parameters are {kind}, draft.expect_{kind} says {expected:,} (difference {found - expected:+,}).",
                "Look at the table: is a head count, a width or a vocabulary not the one you meant? Or mend the expectation.",
            )
    return table


def _prefixes(name: str) -> list[str]:
    """ "midlayer.mlp.up_proj.weight" -> that, "midlayer.mlp.up_proj", "midlayer.mlp", "midlayer" """
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


@torch.no_grad()
def frozen_digests(draft: Draft) -> dict[str, str]:
    """sha256 of the bytes of every tensor that takes no gradient, by name."""
    return {name: _sha256(weight) for name, weight in draft.named_parameters() if not weight.requires_grad}


def _sha256(weight: torch.Tensor) -> str:
    flat = weight.detach().cpu().contiguous().flatten()
    return hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()


def certify(draft: Draft, backward: Callable[[Draft], None]) -> Checks:
    """`backward(draft)` runs a forward and a backward of real rows on the draft it is given; the draft itself is not touched."""
    trial = copy.deepcopy(draft)
    before = {name: weight.detach().clone() for name, weight in trial.named_parameters() if weight.requires_grad}
    frozen = frozen_digests(trial)
    trial.zero_grad()
    backward(trial)
    grads = {name: weight.grad for name, weight in trial.named_parameters()}
    absent = [name for name in before if grads[name] is None]
    bad = [name for name in before if grads[name] is not None and not grads[name].isfinite().all()]
    zero = [name for name in before if grads[name] is not None and not grads[name].any()]
    leaked = [name for name in frozen if grads[name] is not None]
    trained = [weight for weight in trial.parameters() if weight.requires_grad]
    torch.optim.AdamW(
        trained, lr=1e-3, weight_decay=0.1
    ).step()  # decay would move a frozen tensor without any gradient
    moved = [
        name for name, weight in trial.named_parameters() if name in before and not torch.equal(weight, before[name])
    ]
    changed = [name for name, found in frozen_digests(trial).items() if found != frozen[name]]
    count, remedy = (
        len(before),
        "Do not train: the policy and the model disagree. This is a defect; keep the run folder.",
    )
    checks = Checks("freeze certificate, one step on real rows")
    checks.add("trainable tensors without a gradient", not absent, _names(absent), "none", remedy)
    checks.add(
        "gradients with NaN or inf", not bad, _names(bad), "none", "Look for NaN in the stored states (03_verify)."
    )
    checks.add("gradients that are zero", not zero, _names(zero), "none", remedy)
    checks.add("frozen tensors with a gradient", not leaked, _names(leaked), "none", remedy)
    checks.add("trainable tensors that an optimizer step moved", len(moved) == count, len(moved), count, remedy)
    checks.add("frozen tensors that an optimizer step changed", not changed, _names(changed), "none", remedy)
    for name, found in frozen.items():
        checks.add(f"sha256 of frozen {name}", True, found[:16])
    return checks


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"
