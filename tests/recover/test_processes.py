import subprocess
import sys

from filelock import FileLock

from eagle3_helpers.durable import write_json
from eagle3_helpers.recover.processes import (
    Identity,
    describe_processes,
    identify,
    kernels,
    safe_command,
    trainers,
    training_locked,
)
from tests.recover.conftest import WAIT


def note(run, who: Identity, **changes) -> None:
    values = {"pid": who.pid, "created": who.created, **changes}
    write_json(run.folder / "training" / "process.json", values)


def test_an_identity_holds_while_its_process_lives_and_not_after(start):
    process = start("python", "-c", WAIT)
    who = identify(process.pid)
    assert who.runs
    assert who.cmdline == ("python", "-c", WAIT)
    process.kill()
    process.stdout.read()  # its end of the pipe closes with it; it stays unreaped until the next line
    assert not who.runs
    process.wait()
    assert not who.runs


def test_the_same_number_with_another_start_time_is_somebody_else(start):
    who = identify(start("python", "-c", WAIT).pid)
    assert not Identity(who.pid, who.created - 100, who.cmdline).runs
    assert not Identity(who.pid, who.created, ("python", "other.py")).runs


def test_the_trainer_of_a_run_is_the_process_that_its_file_describes(run, start):
    who = identify(start("python", "-c", WAIT).pid)
    assert trainers(run) == []
    note(run, who)
    assert trainers(run) == [who]
    note(run, who, created=who.created - 100)
    assert trainers(run) == []
    note(run, who, pid=None, created=None)  # a launch that was cut short
    assert trainers(run) == []
    (run.folder / "training" / "process.json").write_bytes(b"")
    assert trainers(run) == []


def test_kernels_and_the_trainer_are_listed_with_their_commands(run, start, tmp_path):
    script = tmp_path / "ipykernel_launcher.py"
    script.write_text(WAIT)
    kernel = start("python", str(script), "-f", "kernel-1.json")
    trainer = identify(start("python", "-c", WAIT, "--api-key", "sk-1").pid)
    note(run, trainer)
    assert kernel.pid in [who.pid for who in kernels()]
    text = repr(describe_processes(run))
    assert "kernel-1.json" in text
    assert "trainer of this run" in text
    assert "sk-1" not in text


def test_values_of_secret_options_are_hidden():
    shown = safe_command(
        ["serve", "--api-key", "sk-1", "--hf-token=hf_2", "PASSWORD=3", "--tokenizer-path", "--port", "8000"]
    )
    assert shown == "serve --api-key *** --hf-token=*** PASSWORD=*** --tokenizer-path --port 8000"
    assert len(safe_command(["x" * 500])) == 120


def test_the_training_lock_is_held_only_by_a_living_process(run):
    lock = run.folder / "training" / "lock"
    assert not training_locked(run)
    assert not lock.exists()  # looking makes no file
    lock.parent.mkdir()
    holder = (
        "import filelock, signal, sys\n"
        "lock = filelock.FileLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "print('held', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    assert training_locked(run)
    process.kill()
    process.communicate()
    assert not training_locked(run)
    with FileLock(lock):  # nor did looking keep it
        assert lock.exists()
