"""Who a process is, and which ones belong to a run.

A process id alone names nobody: after a reboot, or a day, the same number is somebody else. An identity is the id, the
start time and the command line; only a process for which all three still hold is the one that was meant. What is shown of
a command line hides what may be a secret.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

import psutil

from eagle3_helpers.display import Table, bytes_text
from eagle3_helpers.durable import read_json
from eagle3_helpers.runs import Run

HIDDEN = "***"
# Words that are part of harmless ones (monkey, tokenizer, author) count only when they stand alone in a name.
SECRET = re.compile(
    r"secret|passw|passphrase|credential|apikey|(?<=[^a-z])pwd|(?<![a-z])(keys?|(auth|access)?token|auth|authorization)(?![a-z])"
)
NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
WHOLE = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)(=|:\s*)(?=.)", re.DOTALL)  # begins a word that is one setting
# Inside a word: after = up to the end of a shell word, after : (a header, JSON) all that follows.
_VALUE = r"""(?(header).+|(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s;])+)"""
VALUE = re.compile(rf"""(?P<sign>["']?\s*(?:=|(?P<header>:))\s*){_VALUE}""", re.DOTALL)
OPTION_VALUE = re.compile(rf"""(?P<sign>["']?\s*(?:=|(?P<header>:))\s*|["']?\s+){_VALUE}""", re.DOTALL)
BEARER = re.compile(r"(\bbearer\s+)\S+", re.IGNORECASE)
USERINFO = re.compile(r"(\w://)(?:[^\s/:@]*:\S*|[^\s/]*)@")  # a password may hold / and @
SHOWN = 120  # characters of a command line


@dataclass(frozen=True)
class Identity:
    """`created` is in seconds since the epoch, as the kernel reports it."""

    pid: int
    created: float
    cmdline: tuple[str, ...] = field(repr=False)  # may hold secrets; `command` may be shown

    @property
    def runs(self) -> bool:
        return identify(self.pid) == self

    @property
    def command(self) -> str:
        return safe_command(self.cmdline)


def identify(pid: int) -> Identity | None:
    """The process that has this id now; None where there is none, it is dead and unreaped, or it may not be looked at."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return Identity(pid, process.create_time(), tuple(process.cmdline()))
    except (psutil.Error, ValueError):
        return None


def safe_command(cmdline: tuple[str, ...] | list[str]) -> str:
    """A command line for eyes and logs: what may be a secret is ***, and all is cut at 120 characters.

    Hidden are the value of a name that sounds like a secret (`--api-key V` whatever V looks like, `TOKEN=V`, `Auth: V`), what
    follows "bearer", and user and password in a URL; inside a word too, as in `sh -c "export KEY=V; ..."`. In doubt too much
    is hidden.
    """
    words, hide = [], False
    for word in cmdline:
        words.append(HIDDEN if hide else _safe_word(word))
        name = word.rstrip(":")
        opens = NAME.fullmatch(name) and _secret(name) and (word.startswith("-") or name != word)
        hide = bool(opens) or word.lower() == "bearer"
    text = " ".join(words)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _safe_word(word: str) -> str:
    whole = WHOLE.match(word)
    if whole and _secret(whole["name"]):
        return f"{whole[0]}{HIDDEN}"
    text, at = "", 0
    for name in NAME.finditer(word):
        if name.start() < at or not _secret(name[0]):
            continue
        value = (OPTION_VALUE if name[0].startswith("-") else VALUE).match(word, name.end())
        if value:
            text += f"{word[at : value.end('sign')]}{HIDDEN}"
            at = value.end()
    text = BEARER.sub(rf"\1{HIDDEN}", text + word[at:])
    return USERINFO.sub(rf"\1{HIDDEN}@", text)


def _secret(name: str) -> bool:
    """Whether a name sounds like a secret: `hfToken` does, `tokenizer` and `max_tokens` do not."""
    return bool(SECRET.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def trainers(run: Run) -> list[Identity]:
    """The run's trainer, if it is still the process that training/process.json describes."""
    noted = read_json(run.folder / "training" / "process.json")
    if not isinstance(noted, dict) or not noted.get("pid") or not noted.get("created"):
        return []  # none, or a launch that was cut short before there was a process
    found = identify(noted["pid"])
    return [found] if found and abs(found.created - noted["created"]) < 0.01 else []


def kernels() -> list[Identity]:
    """Jupyter kernels of this machine: what an interrupted notebook leaves behind."""
    everyone = (identify(pid) for pid in psutil.pids())
    return [who for who in everyone if who and any("ipykernel" in word for word in who.cmdline[:4])]


def describe_processes(run: Run) -> Table:
    """The run's trainer and all kernels, with what each holds in memory."""
    rows = [
        [kind, str(who.pid), _started(who), _memory(who.pid), who.command]
        for kind, group in (("trainer of this run", trainers(run)), ("kernel", kernels()))
        for who in group
    ]
    return Table(["what", "pid", "started (UTC)", "memory", "command"], rows, "processes of the runbook")


def _started(who: Identity) -> str:
    return datetime.fromtimestamp(who.created, UTC).isoformat(sep=" ", timespec="seconds")[:19]


def _memory(pid: int) -> str:
    try:
        return bytes_text(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return "gone"
