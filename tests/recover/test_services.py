import pytest

from eagle3_helpers.recover.services import describe_services, inference_servers, server_of

LISTEN = (
    "import socket, sys\n"
    "server = socket.create_server(('127.0.0.1', 0))\n"
    "open(sys.argv[-1], 'w').write(str(server.getsockname()[1]))\n"
    "print('ready', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.mark.parametrize(
    ("command", "server"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B", "vLLM"),
        ("/opt/venv/bin/python3.12 /opt/venv/bin/vllm serve model", "vLLM"),
        ("python -u -m vllm.entrypoints.openai.api_server --model m", "vLLM"),
        ("VLLM::EngineCore", "vLLM"),
        ("python3 -m sglang.launch_server --model-path m", "SGLang"),
        ("sglang serve --model-path m", "SGLang"),
        ("sglang::scheduler_TP0", "SGLang"),
        ("text-generation-launcher --model-id m", "TGI"),
        ("/usr/local/bin/ollama serve", "Ollama"),
        ("ollama run llama3", None),
        ("vim vllm.entrypoints.py", None),
        ("grep vllm serve", None),
        ("python -c import_vllm", None),
        ("python -m", None),
        ("python", None),
        ("", None),
    ],
)
def test_a_server_is_known_by_what_its_command_runs(command, server):
    assert server_of(tuple(command.split())) == server


def test_running_servers_are_listed_with_their_ports_and_nothing_else_is(start, tmp_path):
    script = tmp_path / "vllm"
    script.write_text(LISTEN)
    server = start("python", str(script), "serve", "model", "--api-key", "sk-1", str(tmp_path / "port"))
    start("python", str(script), "bench", str(tmp_path / "other"))
    found = [service for service in inference_servers() if service.owner and service.owner.pid == server.pid]
    port = int((tmp_path / "port").read_text())
    assert [(service.server, service.ports) for service in found] == [("vLLM", [port])]
    table = repr(describe_services())
    assert str(server.pid) in table
    assert "sk-1" not in table
    assert "bench" not in table
    assert server.poll() is None  # looking stops nothing


def test_a_dead_server_is_not_listed(start, tmp_path):
    script = tmp_path / "ollama"
    script.write_text(LISTEN)
    server = start("python", str(script), "serve", str(tmp_path / "port"))
    assert server.pid in [service.owner.pid for service in inference_servers() if service.owner]
    server.kill()
    server.wait()
    assert server.pid not in [service.owner.pid for service in inference_servers() if service.owner]
