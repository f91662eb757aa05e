"""Inference servers that run on this machine: a service that starts itself after a reboot takes the GPUs before anyone looks.

They are recognised by what their command line runs (vLLM, SGLang, TGI, Ollama) and listed with the ports they listen on. A
usual port that is held by a process nobody here may look at is listed too. Nothing is stopped by this module.
"""

from dataclasses import dataclass
from pathlib import PurePath

import psutil

from eagle3_helpers.display import Table
from eagle3_helpers.recover.processes import Identity, identify

USUAL_PORTS = {8000: "vLLM", 30000: "SGLang", 11434: "Ollama"}


@dataclass(frozen=True)
class Service:
    """`owner` is None where the process behind a usual port is not visible from here."""

    server: str
    owner: Identity | None
    ports: list[int]


def inference_servers() -> list[Service]:
    """Every recognised server process, then usual ports whose holder is not visible."""
    listening = _listening()
    found = []
    for pid in psutil.pids():
        who = identify(pid)
        server = who and server_of(who.cmdline)
        if server:
            found.append(Service(server, who, sorted(port for port, holder in listening if holder == pid)))
    hidden = sorted({port for port, holder in listening if holder is None and port in USUAL_PORTS})
    return found + [Service(f"{USUAL_PORTS[port]}'s usual port", None, [port]) for port in hidden]


def server_of(cmdline: tuple[str, ...]) -> str | None:
    """The server that a command line runs; None for anything else, such as an editor with a server's file open."""
    program, argument = _program(cmdline)
    title = cmdline[0] if cmdline else ""
    if (program, argument) == ("vllm", "serve") or program.startswith("vllm.entrypoints") or title.startswith("VLLM::"):
        return "vLLM"
    if (program, argument) == ("sglang", "serve") or program == "sglang.launch_server" or title.startswith("sglang::"):
        return "SGLang"
    if program in ("text-generation-launcher", "text-generation-router", "text-generation-server"):
        return "TGI"
    if program == "ollama" and argument in ("serve", "runner"):
        return "Ollama"
    return None


def describe_services() -> Table:
    rows = [
        [
            service.server,
            str(service.owner.pid) if service.owner else "unknown",
            ", ".join(map(str, service.ports)) or "none seen",
            service.owner.command if service.owner else "owner not visible from here",
        ]
        for service in inference_servers()
    ]
    return Table(
        ["server", "pid", "ports", "command"], rows, "inference servers" if rows else "no inference server runs"
    )


def _program(cmdline: tuple[str, ...]) -> tuple[str, str]:
    """What runs, and its first argument. Of an interpreter: the module after -m, or the script."""
    words = list(cmdline)
    if words and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[1:]
        if words[:1] == ["-m"]:
            return (words[1:] or [""])[0], (words[2:] or [""])[0]
    return PurePath((words or [""])[0]).name, (words[1:] or [""])[0]


def _listening() -> list[tuple[int, int | None]]:
    """(port, process id or None where not visible) of every listening TCP socket; empty where the system does not tell."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    return [(entry.laddr.port, entry.pid) for entry in connections if entry.status == psutil.CONN_LISTEN]
