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
# What PyYAML raises on text: its own errors, ValueError (the 40th of May), RecursionError (an anchor inside itself).
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


def home() -> Path:
    """The folder with `notebooks/`, `params/`, `outputs/`: EAGLE3_RUNBOOK_HOME, else the one around this package."""
    chosen = os.environ.get("EAGLE3_RUNBOOK_HOME")
    return Path(chosen).resolve() if chosen else Path(__file__).resolve().parents[1]


def resolve(path: str) -> Path:
    """Absolute; a relative path starts at home(). Raises BadParams for ~ of a user who is not known here."""
    try:
        return (home() / Path(path).expanduser()).absolute()
    except RuntimeError as error:
        raise BadParams(f"{path}: nobody of that name has a home here.", "Write the path in full.") from error


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


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
    """The model that the draft will serve."""

    path: str
    """Folder of the model in Hugging Face layout."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of its weights while it runs, and of the stored states."""
    trust_remote_code: bool = False
    """Whether code in the model folder may run. Never turned on by itself."""
    boundaries: list[int] | None = None
    """The three h_k to capture (h_k enters layer k). Left out: [2, N//2, N-3]."""
    shape: TargetShape | None = None
    """The target's numbers, where its folder is not on this machine: enough for tables, not for weights."""


class SamplesParams(Section):
    """From conversations to token ids and loss masks."""

    conversations: str
    """JSONL, a row a conversation: `messages` (role/content) or `conversations` (from/value)."""
    max_length: Positive = 2048
    """Tokens. A longer sample is cut there, and rejected if nothing supervised is left."""
    answer_tokens: Positive = 256
    """Where the target answers prompt-only rows itself: at most this many tokens an answer."""
    answer_batch: Positive = 16
    """Prompts answered in one batch."""


class CaptureParams(Section):
    """How the target's hidden states are taken."""

    backend: Literal["transformers"] = "transformers"
    """What runs the target."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs."""
    batch_tokens: Positive = 4096
    """Tokens in one forward, padding included."""


class StoreParams(Section):
    """Where hidden states are kept."""

    data_root: str
    """Folder of all stores: the big, fast volume."""
    name: Name
    """The store's folder inside data_root. One store holds states of one capture record."""
    writers: Positive = 2
    """Threads that write files."""
    reserve_gb: float = Field(default=1.0, ge=0)
    """GB (1e9 bytes) that must stay free on the volume."""


class DraftParams(Section):
    """The shape of the draft. Numbers that are left out are the target's."""

    vocab_size: Positive = 32000
    """Tokens that the draft can propose (D)."""
    num_attention_heads: Positive | None = None
    """Query heads."""
    num_key_value_heads: Positive | None = None
    """Key and value heads."""
    head_dim: Positive | None = None
    """Width of a head."""
    intermediate_size: Positive | None = None
    """Width of the MLP."""
    freeze_lm_head: bool = False
    """Keep the draft's head as the target's rows (as speculators does) in place of training it."""
    expect_trainable: Positive | None = None
    """Trainable parameters expected; a freeze table with another total is refused."""
    expect_frozen: Positive | None = None
    """Frozen parameters expected; likewise."""


class TrainingParams(Section):
    """Training-time test (TTT) on stored states."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the draft trains."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the matrix products. Weights and moments are float32 always."""
    ttt_steps: Positive = 7
    """Drafting steps unrolled in training (S)."""
    step_decay: float = Field(default=0.8, gt=0, le=1)
    """Step i weighs step_decay ** i in the loss."""
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW; cosine to zero after the warm-up. In YAML write 1.0e-4, not 1e-4."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's two averages."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Largest norm of the whole gradient."""
    warmup_fraction: Fraction = 0.015
    """Share of the optimizer steps with rising learning rate."""
    epochs: Positive = 1
    """Passes over the training samples."""
    samples_per_step: Positive = 8
    """Samples of one optimizer step, over all micro-batches."""
    micro_batch_tokens: Positive = 8192
    """Tokens packed into one forward."""
    held_out_fraction: Fraction = 0.05
    """Share of the samples kept for evaluation during training."""
    evaluate_every: Positive = 200
    """Optimizer steps between two evaluations on the held-out samples."""
    checkpoint_every: Positive = 200
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept, besides the best one."""
    max_skips: Annotated[int, Field(ge=0)] = 3
    """Optimizer steps with NaN or inf that are left out before training stops."""
    seed: int = 0
    """Decides initial weights and the order of samples."""


class GateParams(Section):
    """What a person confirms before training."""

    approval_hours: float = Field(default=4.0, gt=0)
    """An approval older than this is void."""
    auto_approve_max_gpu_hours: float = Field(default=0.0, ge=0)
    """`run --approve-as NAME` approves plans up to this many GPU hours: 0 means CPU-only plans."""
    cost_per_gpu_hour: float = Field(default=0.0, ge=0)
    """Money per GPU hour, for the plan."""
    gpu_watts: float = Field(default=0.0, ge=0)
    """Power of one GPU while training, for the kWh in the plan."""


class EvaluationParams(Section):
    """What the draft is measured on."""

    prompts: str
    """JSONL of `turns` and `category` (Spec-Bench layout). Never trained on."""
    max_prompts: Positive = 96
    """Prompts used, spread evenly over the categories."""
    answer_tokens: Positive = 64
    """Tokens generated per prompt."""
    draft_tokens: Positive = 3
    """Tokens drafted in a chain before the target verifies them."""
    batch: Positive = 16
    """Prompts decoded side by side."""
    tie_gap: float = Field(default=0.5, ge=0)
    """Where drafting changes a greedy token: the largest gap of target logits that counts as a numerical tie."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type in which target and draft decode."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where they decode."""
    seed: int = 0
    """Of the bootstrap."""


class Params(Section):
    """Everything a run may be told."""

    run_id: Name
    """Names the folder under outputs/."""
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
    except UnicodeDecodeError as error:
        raise BadParams(f"params file {path} is not UTF-8: {error}.", "Save it as UTF-8.") from error
    return parse_params(text, path, overrides)


def parse_params(text: str, path: Path, overrides: dict | None = None) -> Params:
    """`load_params` for text that is, or will be, the file at `path`. Raises BadParams."""
    lines: dict[tuple, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise BadParams(f"{path} holds no settings.", "Start from a file that `eagle3-runbook new-params` writes.")
        _note_lines(node, (), lines, path)
        values = yaml.safe_load(text)
    except YAML_ERRORS as error:
        raise BadParams(f"{path} is not YAML for settings: {one_line(error)}.", "Mend that place.") from error
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
            if not isinstance(key, yaml.ScalarNode):
                raise BadParams(f"{path}, line {key.start_mark.line + 1}: a name is a word.", "Write name: value.")
            here = (*place, key.value)
            if here in lines:
                raise BadParams(
                    f"{path}, line {key.start_mark.line + 1}: {'.'.join(here)} is given twice.", "Keep one of the two."
                )
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines, path)


def one_line(error: Exception) -> str:
    """An error's message without line breaks and without its last dot; its kind where it says nothing."""
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__


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
