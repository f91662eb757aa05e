"""The fields of plan.json. A file with another field, one too few, or text where a number belongs is not a plan."""

from typing import Annotated, Literal

from pydantic import Field

from eagle3_helpers.params import Name, Section

NotNegative = Annotated[float, Field(ge=0)]


class Estimate(Section):
    evaluations: int
    checkpoints: int  # at most
    seconds: NotNegative
    hours: NotNegative
    gpu_hours: NotNegative  # 0 on the CPU
    kwh: NotNegative
    cost: NotNegative
    warmup: dict = Field(alias="from")


class Contents(Section):
    run_id: Name
    argv: list[str]  # what the launch executes
    environment: list[str]  # names of variables that the trainer takes notice of, as far as they are set
    device: Literal["cpu", "cuda"]
    gpus: list[str]  # UUIDs; none on the CPU
    code: dict  # commit, dirty (any file of the checkout), diff (sha256 of the package's difference from the commit)
    versions: dict[str, str]
    data: dict  # capture_record (digest); samples, tokens, bytes of their states
    freeze_table: dict  # digest, trainable, frozen
    spec: dict  # the TrainingSpec: all that the trainer reads
    estimate: Estimate
    disk: dict  # needed, free (bytes)
    checkpoints: str
    stop_rules: list[str]
    undo: str
    created: str
