"""The params file: one strict model of everything a run may be told.

Unknown names, text where a number belongs (YAML reads `1e-4` as text), a truth value where a name belongs (YAML reads
`yes` as true) and a key given twice are errors with the line in the file and what would be allowed. Relative paths are
read from the runbook's home: the folder that holds `notebooks/`, `params/` and `outputs/`.
"""

import difflib
import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_helpers.errors import BadParams

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]


def home() -> Path:
    """The folder with `notebooks/`, `params/`, `outputs/`: EAGLE3_RUNBOOK_HOME, else the one around this package."""
    chosen = os.environ.get("EAGLE3_RUNBOOK_HOME")
    return Path(chosen).resolve() if chosen else Path(__file__).resolve().parents[1]


def resolve(path: str) -> Path:
    return (home() / Path(path).expanduser()).absolute()


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetShape(Section):
    """The numbers of a target whose folder is not on this machine; enough for tables and plans, not for weights."""

    hidden_size: Positive
    num_hidden_layers: Positive
    vocab_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive


class TargetParams(Section):
    """The model that the draft serves."""

    path: str  # folder in Hugging Face layout
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of its weights while it runs, and of the states
    trust_remote_code: bool = False  # running code from the model folder needs an explicit yes
    boundaries: list[int] | None = None  # h_k to capture; none: [2, N//2, N-3]
    shape: TargetShape | None = None  # only where the folder is not here


class SamplesParams(Section):
    """From conversations to token ids and loss masks."""

    conversations: str  # JSONL: `messages` (role/content) or `conversations` (from/value)
    max_length: Positive = 2048  # tokens; a longer sample is cut, and rejected if nothing trained is left
    answer_tokens: Positive = 256  # at most this many per answer where the target answers prompt-only rows itself
    answer_batch: Positive = 16


class CaptureParams(Section):
    """How the target's hidden states are taken."""

    backend: Literal["transformers"] = "transformers"
    device: Literal["cpu", "cuda"] = "cpu"
    batch_tokens: Positive = 4096  # padded tokens per forward


class StoreParams(Section):
    """Where hidden states are kept."""

    data_root: str
    name: Name
    writers: Positive = 2  # threads
    reserve_gb: float = Field(default=1.0, ge=0)  # GB (1e9 bytes) that stay free on the volume


class DraftParams(Section):
    """The shape of the draft; numbers left out are the target's."""

    vocab_size: Positive = 32000
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive | None = None
    freeze_lm_head: bool = False
    expect_trainable: Positive | None = None  # a freeze table with another total is refused
    expect_frozen: Positive | None = None


class TrainingParams(Section):
    """Training-time test (TTT) on stored states."""

    device: Literal["cpu", "cuda"] = "cpu"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # products; weights and moments are float32
    ttt_steps: Positive = 7
    step_decay: float = Field(default=0.8, gt=0, le=1)
    lr: float = Field(default=1e-4, gt=0)
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, gt=0)
    warmup_fraction: Fraction = 0.015
    epochs: Positive = 1
    samples_per_step: Positive = 8  # an optimizer step, over all micro-batches
    micro_batch_tokens: Positive = 8192  # packed rows in one forward
    held_out_fraction: Fraction = 0.05
    evaluate_every: Positive = 200  # optimizer steps
    checkpoint_every: Positive = 200
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    max_skips: Annotated[int, Field(ge=0)] = 3  # optimizer steps with a NaN or inf that may be left out
    seed: int = 0


class GateParams(Section):
    """What a person must confirm before training."""

    approval_hours: float = Field(default=4.0, gt=0)  # an approval older than this is void
    auto_approve_max_gpu_hours: float = Field(default=0.0, ge=0)  # limit of `run --approve-as`
    cost_per_gpu_hour: float = Field(default=0.0, ge=0)
    gpu_watts: float = Field(default=0.0, ge=0)  # per GPU, for the kWh in the plan


class EvaluationParams(Section):
    """What the draft is measured on."""

    prompts: str  # JSONL of `turns` and `category` (Spec-Bench layout)
    max_prompts: Positive = 96
    answer_tokens: Positive = 64  # generated per prompt
    draft_tokens: Positive = 3  # chain length
    batch: Positive = 16
    tie_gap: float = Field(default=0.5, ge=0)  # logit gap up to which a different greedy token is a numerical tie
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0


class Params(Section):
    run_id: Name
    target: TargetParams
    samples: SamplesParams
    capture: CaptureParams = CaptureParams()
    store: StoreParams
    draft: DraftParams = DraftParams()
    training: TrainingParams = TrainingParams()
    gate: GateParams = GateParams()
    evaluation: EvaluationParams

    @property
    def store_folder(self) -> Path:
        return resolve(self.store.data_root) / self.store.name

    def values(self, *sections: str) -> dict:
        """Plain values of the named sections (all without names); what digests of a stage's inputs are made of."""
        everything = self.model_dump(mode="json")
        return {name: everything[name] for name in sections} if sections else everything


def load_params(path: str | Path, overrides: dict | None = None) -> Params:
    """Reads a params file; `overrides` are dotted names and values, e.g. {"training.lr": 0.001}.

    Raises BadParams with the line, the value and what is allowed.
    """
    path = resolve(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadParams(
            f"params file {path} cannot be read: {error.strerror}.", "Give an existing file with -p."
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise BadParams(f"{path} is not YAML: {' '.join(str(error).split())}.", "Mend that line.") from error
    if not isinstance(node, yaml.MappingNode):
        raise BadParams(f"{path} holds no settings.", "Start from a file that `eagle3-runbook new-params` writes.")
    lines: dict[tuple, int] = {}
    _note_lines(node, (), lines, path)
    values = yaml.safe_load(text)
    for name, value in (overrides or {}).items():
        _override(values, name, value)
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        raise BadParams(
            "; ".join(_sentence(problem, path, lines, overrides or {}) for problem in error.errors()),
            "Mend the params file; README.md lists every name.",
        ) from error


def _note_lines(node, place: tuple, lines: dict, path: Path) -> None:
    """Records the line of every key, and refuses a key that is given twice (YAML would keep the last in silence)."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, key.value)
            if here in lines:
                raise BadParams(
                    f"{path}, line {key.start_mark.line + 1}: {'.'.join(here)} is given twice.", "Keep one of the two."
                )
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines, path)


def _override(values: dict, name: str, value) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise BadParams(f"override {name}: {section} is not a section.", "Use section.name.")
    values[last] = value


def _sentence(problem: dict, path: Path, lines: dict, overrides: dict) -> str:
    """One pydantic error as a sentence with its place, value and remedy."""
    place = tuple(
        str(part)
        for part in problem["loc"]
        if not str(part).startswith(("function-", "tuple[", "list[", "int", "nullable"))
    )
    name = ".".join(place)
    near = place
    while near and near not in lines:
        near = near[:-1]
    where = "override" if name in overrides else f"{path}, line {lines[near]}" if near else str(path)
    value = problem["input"]
    if problem["type"] == "extra_forbidden":
        allowed = _allowed_names(place[:-1])
        close = difflib.get_close_matches(place[-1], allowed, 1)
        hint = f"Did you mean {close[0]}?" if close else f"Allowed here: {', '.join(allowed)}."
        return f"{where}: {name} is not a known name. {hint}"
    if problem["type"] == "missing":
        return f"{where}: {name} is missing"
    if isinstance(value, str) and _is_number(value):
        return f"{where}: {name} is the text {value!r}, not a number; write {float(value)!r} (YAML wants a dot: 1.0e-4)"
    if isinstance(value, bool) and "string" in problem["type"]:
        return f"{where}: {name} is the truth value {value}, not a name; put it in quotes"
    return f"{where}: {name} = {value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _allowed_names(place: tuple) -> list[str]:
    model = Params
    for part in place:
        annotation = model.model_fields[part].annotation
        inner = [
            kind
            for kind in getattr(annotation, "__args__", (annotation,))
            if isinstance(kind, type) and issubclass(kind, Section)
        ]
        if not inner:
            return []
        model = inner[0]
    return sorted(model.model_fields)
