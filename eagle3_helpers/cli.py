"""The command `eagle3-runbook`.

Exit codes: 0 done, 1 failed, 2 bad parameters or usage, 3 waiting for approval, 4 a check refused, 130/143 interrupted.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import yaml
from filelock import Timeout

from eagle3_helpers.errors import BadParams, CheckRefused, Refusal

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

ParamsFile = Annotated[str, typer.Option("--params", "-p", help="The params file.")]
RunId = Annotated[str, typer.Option("--run-id", help="Name of the run folder; left out: the one in the params file.")]
RunName = Annotated[str, typer.Option("--run", help="Name of the run folder under outputs/.")]


@app.command()
def run(
    params: ParamsFile,
    first: Annotated[str, typer.Option("--from", help="First stage, e.g. extract.")] = "01_recover",
    last: Annotated[str, typer.Option("--to", help="Last stage.")] = "06_evaluate",
    run_id: RunId = "",
    override: Annotated[
        list[str], typer.Option("--set", help="section.name=value, read as YAML; may be repeated.")
    ] = [],  # noqa: B006
    approve_as: Annotated[
        str, typer.Option(help="Approve a plan within gate.auto_approve_max_gpu_hours in this name.")
    ] = "",
) -> None:
    """Run the stages headless. What is done is skipped; without a valid approval it stops before 05_train with exit 3."""
    from eagle3_helpers.runner import run_stages

    raise typer.Exit(run_stages(params, run_id, _overrides(override), first, last, approve_as))


@app.command()
def status(run: RunName) -> None:
    """Show which stages are done, stale or to do, the approval and the trainer. Changes nothing."""
    from eagle3_helpers.gate.approval import approval_status
    from eagle3_helpers.runs import reopen_run
    from eagle3_helpers.stages import status_table
    from eagle3_helpers.training.launch import trainer_status

    opened = reopen_run(run)
    print(status_table(opened), approval_status(opened), trainer_status(opened.folder / "training"), sep="\n\n")


@app.command()
def approve(
    run: RunName,
    digest: Annotated[str, typer.Option(help="All 64 characters of the plan's sha256.")],
    name: Annotated[str, typer.Option(help="Who approves.")],
    reason: Annotated[str, typer.Option(help="Why.")],
) -> None:
    """Approve the plan with this digest."""
    from eagle3_helpers.gate.approval import approve as record
    from eagle3_helpers.gate.plan import read_plan
    from eagle3_helpers.runs import reopen_run

    opened = reopen_run(run)
    print(read_plan(opened))
    record(opened, digest, name, reason, "command")
    print(f"approved for {opened.params.gate.approval_hours:g} h, one launch")


@app.command()
def reject(
    run: RunName,
    digest: Annotated[str, typer.Option(help="All 64 characters of the plan's sha256.")],
    name: Annotated[str, typer.Option(help="Who rejects.")],
    reason: Annotated[str, typer.Option(help="Why.")],
) -> None:
    """Reject the plan with this digest; the record is kept."""
    from eagle3_helpers.gate.approval import reject as record
    from eagle3_helpers.runs import reopen_run

    record(reopen_run(run), digest, name, reason, "command")
    print("rejected")


@app.command()
def stop(run: RunName, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Ask the trainer of a run to write a checkpoint and end. Only a process that is provably its own is signalled."""
    from eagle3_helpers.runs import reopen_run
    from eagle3_helpers.training.launch import stop_trainer, trainer_status

    folder = reopen_run(run).folder / "training"
    print(trainer_status(folder))
    if not yes:
        typer.confirm("Stop it after the step it is in?", abort=True)
    print(stop_trainer(folder))


@app.command()
def report(run: RunName) -> None:
    """Write report.html of a run from what its folder holds."""
    from eagle3_helpers.report.page import build_report
    from eagle3_helpers.runs import reopen_run

    print(build_report(reopen_run(run)))


@app.command()
def answer(
    params: ParamsFile,
    prompts: Annotated[Path, typer.Option(help="JSONL of conversations.")],
    out: Annotated[Path, typer.Option(help="JSONL to write; an unfinished one is continued.")],
    again: Annotated[bool, typer.Option("--again", help="Drop the last answer of each row and make it anew.")] = False,
) -> None:
    """Let the target answer prompts itself, so that training data is its own text."""
    from eagle3_helpers.params import load_params
    from eagle3_helpers.samples.answers import answer_prompts
    from eagle3_helpers.target import Target

    loaded = load_params(params)
    answer_prompts(loaded, Target(loaded.target), prompts, out, again=again)


@app.command("new-params")
def new_params(
    path: Annotated[Path, typer.Argument(help="File to write, e.g. params/mine.yaml.")],
    target: Annotated[str, typer.Option(help="Folder of the target model.")],
    conversations: Annotated[str, typer.Option(help="JSONL of conversations.")],
    prompts: Annotated[str, typer.Option(help="JSONL of evaluation prompts.")],
    data_root: Annotated[str, typer.Option(help="Folder for hidden states.")],
) -> None:
    """Write a params file with every setting, its default and what it means.

    PATH is relative to the folder you are in; paths inside the file are read from the runbook's home.
    """
    from eagle3_helpers.durable import write_text
    from eagle3_helpers.params import parse_params
    from eagle3_helpers.params_reference import commented_params

    path = path.absolute()
    if path.exists():
        raise BadParams(f"{path} exists.", "Choose another name; nothing is overwritten.")
    given = {
        "run_id": path.stem,
        "target.path": target,
        "samples.conversations": conversations,
        "store.data_root": data_root,
        "store.name": path.stem,
        "evaluation.prompts": prompts,
    }
    text = commented_params(given)
    try:
        parse_params(text, path)
    except BadParams as error:
        raise BadParams(
            f"nothing written: {error.what}",
            "The file's name names the run: at most 64 letters, digits, dots, dashes and underscores.",
        ) from error
    write_text(path, text)
    print(f"{path} written; next: eagle3-runbook run -p {shlex.quote(str(path))}")


@app.command("freeze-table")
def show_freeze_table(
    params: ParamsFile, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for a program.")] = False
) -> None:
    """Show what of the draft trains and what is frozen, with counts and memory.

    Needs no weights, and no model folder where the params file has target.shape.
    """
    from eagle3_helpers.draft.freeze import freeze_table
    from eagle3_helpers.draft.model import DraftConfig
    from eagle3_helpers.params import load_params
    from eagle3_helpers.target import Target

    loaded = load_params(params)
    target = Target(loaded.target)
    table = freeze_table(DraftConfig.from_params(loaded.draft, target), loaded.draft)
    if as_json:
        print(json.dumps(table.to_dict(), indent=2))
    else:
        print(table, f"hidden states: {target.bytes_per_token:,} bytes a token", sep="\n")


def _overrides(settings: list[str]) -> dict:
    from eagle3_helpers.params import YAML_ERRORS, one_line

    values = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign:
            raise BadParams(f"--set {setting!r} has no '='.", "Write --set section.name=value.")
        try:
            values[name] = yaml.safe_load(text)
        except YAML_ERRORS as error:
            raise BadParams(
                f"--set {setting!r} is not YAML: {one_line(error)}.", "Put text with special characters in quotes."
            ) from error
    return values


def main() -> None:
    try:
        app()
    except Refusal as refusal:
        _leave(refusal)
    except Timeout as error:
        _leave(CheckRefused(f"another process holds {error.lock_file}.", "Wait until it is done, then run this again."))
    except OSError as error:
        what = error.strerror or str(error) or type(error).__name__
        place = f"{error.filename}: " if error.filename is not None else ""
        _leave(CheckRefused(f"{place}{what}.", "Check that path: the mount, its free space, and who may write there."))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(refusal: Refusal) -> NoReturn:
    """Says the refusal and ends with its exit code."""
    print(f"{type(refusal).__name__}: {refusal.what}", file=sys.stderr)
    if refusal.remedy:
        print(f"Next: {refusal.remedy}", file=sys.stderr)
    sys.exit(refusal.exit_code)


if __name__ == "__main__":
    main()
