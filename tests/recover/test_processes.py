import pytest

from eagle3_helpers.durable import write_json
from eagle3_helpers.recover.processes import (
    Identity,
    describe_processes,
    identify,
    kernels,
    safe_command,
    trainers,
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


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--api-key", "sk-1", "--port", "8"], "serve --api-key *** --port 8"),
        (["serve", "--api-key", "-sk123", "--port", "8"], "serve --api-key *** --port 8"),
        (["--hf-token=hf_2", "--hfToken", "q"], "--hf-token=*** --hfToken ***"),
        (["PASSWORD=a b", "PGPASSWORD=x", "MYSQL_PWD=y"], "PASSWORD=*** PGPASSWORD=*** MYSQL_PWD=***"),
        (["docker", "-eAPI_KEY=1", "-Ddb.credentials=x"], "docker -eAPI_KEY=*** -Ddb.credentials=***"),
        (["curl", "-H", "Authorization: Bearer sk-1"], "curl -H Authorization: ***"),
        (["curl", "--header=Authorization: Basic c2s="], "curl --header=Authorization: ***"),
        (["curl", "Authorization:", "Bearer", "sk-1", "h"], "curl Authorization: *** *** h"),
        (["say", "bearer sk-1 to", "Bearer", "sk-2"], "say bearer *** to Bearer ***"),
        (["sh", "-c", "curl -H 'X-Api-Key: sk' http://h"], "sh -c curl -H 'X-Api-Key: ***"),
        (["sh", "-c", "export OPENAI_API_KEY=sk-9; serve m"], "sh -c export OPENAI_API_KEY=***; serve m"),
        (["sh", "-c", 'SECRET="a b"c\\ d; go'], "sh -c SECRET=***"),
        (["sh", "-c", 'cd x; SECRET="a b"c\\ d; go'], "sh -c cd x; SECRET=***; go"),
        (["sh", "-c", "serve --api-key 'a b' --port 8"], "sh -c serve --api-key *** --port 8"),
        (["x", '{"api_key": "sk", "port": 8}'], 'x {"api_key": ***'),
        (["psql", "postgres://u:pw@h/db"], "psql postgres://***@h/db"),
        (["psql", "postgres://u:p/w@x@h/db"], "psql postgres://***@h/db"),
        (["git", "clone", "https://ghp_1@github.com/x"], "git clone https://***@github.com/x"),
        (["get", "https://h/x?token=sk&page=1"], "get https://h/x?token=***"),
    ],
)
def test_what_may_be_a_secret_is_hidden(words, shown):
    assert safe_command(words) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--tokenizer", "/m", "--tokenizer-path=/m", "--max-tokens", "8", "--author", "me"],
        ["monkey=1", "PWD=/home", "http://h:80/x", "git+https://h/x@v1", "--keyboard", "de", "the", "key", "2"],
    ],
)
def test_what_only_resembles_a_secret_is_shown(words):
    assert safe_command(words) == " ".join(words)


def test_a_long_command_is_cut_and_an_identity_never_shows_its_words():
    assert len(safe_command(["x" * 500])) == 120
    assert "sk-1" not in repr(Identity(1, 2.0, ("serve", "sk-1")))
