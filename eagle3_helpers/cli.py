"""The command `eagle3-runbook`.

Exit codes: 0 done, 1 failed, 2 bad parameters or usage, 3 waiting for approval, 4 a check refused, 130/143 interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from eagle3_helpers.errors import BadParams, Refusal

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
    """Write a params file with every setting, its default and what it means."""
    from eagle3_helpers.durable import write_text
    from eagle3_helpers.params import load_params
    from eagle3_helpers.params_reference import commented_params

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
    write_text(path, commented_params(given))
    load_params(path.absolute())
    print(f"{path} written; next: eagle3-runbook run -p {path}")


def _overrides(settings: list[str]) -> dict:
    values = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign:
            raise BadParams(f"--set {setting!r} has no '='.", "Write --set section.name=value.")
        values[name] = yaml.safe_load(text)
    return values


def main() -> None:
    try:
        app()
    except Refusal as refusal:
        print(f"{type(refusal).__name__}: {refusal.what}", file=sys.stderr)
        if refusal.remedy:
            print(f"Next: {refusal.remedy}", file=sys.stderr)
        sys.exit(refusal.exit_code)


if __name__ == "__main__":
    main()
