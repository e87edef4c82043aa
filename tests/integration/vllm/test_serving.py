"""`vllm serve` with the connector: two clients, kill -9 during saves, a restart that finds what was saved."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.integration.vllm.wrapper import transfer_config
from lmcache_cli.store import Store
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import VerifyOptions, verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SYSTEM = " ".join(f"Rule {n}: answer question number {n} in exactly {n} words." for n in range(70))
START_S = 900
VLLM = """
import importlib.metadata
import vllm
from vllm.entrypoints.cli.main import main
from vllm.platforms import current_platform

if __name__ == "__main__":
    assert current_platform.is_cpu()
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else version(name)
    main()
"""
"""The command `vllm`. It asks for the version of a distribution of that name, and ends where that has another one."""


class Server:
    """A server that was started, and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def chat(self, question: str) -> Any:
        body = {
            "model": "small",
            "temperature": 0,
            "max_tokens": 4,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        }
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    def metric(self, name: str) -> float:
        """The sum over engines; 0 where it was never counted."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def kill(self) -> None:
        """Every process of the server at once, without a chance to say good-bye."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)


@contextlib.contextmanager
def served(model_dir: Path, root: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"store": str(root), "create_store": True}
    command = [sys.executable, "-c", VLLM, "serve", str(model_dir)]
    command += ["--served-model-name", "small", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    command += ["--kv-transfer-config", json.dumps(transfer_config(options))]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = Server(process, port)
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                server.get("/health")
                break
            time.sleep(1.0)
        yield server
    finally:
        server.kill()


def ask_and_forget(server: Server, text: str) -> None:
    with contextlib.suppress(OSError):
        server.chat(text)


def test_a_restarted_server_finds_what_was_saved_before_it_was_killed(model_dir: Path, tmp_path: Path):
    root, log = tmp_path / "kv", tmp_path / "log"
    with served(model_dir, root, log) as server:
        answers: dict[str, Any] = {}

        def ask(text: str) -> None:
            answers[text] = server.chat(text)

        texts = ("Which rule is the first?", "Which rule is the last?")
        clients = [threading.Thread(target=ask, args=(text,)) for text in texts]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert len(answers) == 2
        assert answers["Which rule is the first?"]["usage"]["prompt_tokens"] > 1024
        threading.Thread(target=ask_and_forget, args=(server, "More " * 300), daemon=True).start()
        time.sleep(0.5)
        server.kill()
    with Store.open(str(root)) as store:
        report = verify(store, VerifyOptions(Level.FULL))
        assert report.num_damaged == 0
    with served(model_dir, root, log) as server:
        again = server.chat("Which rule is the first?")
        assert again["choices"][0]["message"]["content"]
        assert server.metric("vllm:external_prefix_cache_hits_total") >= 1024
        assert server.metric("vllm:lmcache_store_tokens_loaded_total") >= 1024
        assert server.metric("vllm:lmcache_store_load_failed_total") == 0
        check_warming(server, model_dir, root, tmp_path)


def check_warming(server: Server, model_dir: Path, root: Path, folder: Path) -> None:
    """`warm --server` has the server compute a text and a chat, and finds their full chunks in its store."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What was asked before?"}]
    lines = [{"name": "chat", "messages": chat}, {"name": "text", "prompt": "Once upon a time. " * 120}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "lmcache_cli", "warm", "--store", str(root), "--model", str(model_dir), "--json"]
    command += ["--prompts", str(folder / "prompts.jsonl"), "--server", server.url]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["num_complete"], summary["num_failed"]) == (2, 0)
    assert summary["tokens_present"] >= 1024  # the chat begins as those before
    assert summary["shards_after"] - summary["shards_before"] == summary["chunks_stored"] >= 2
    again = json.loads(
        subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300).stdout
    )
    assert (again["exit_code"], again["tokens_computed"], again["chunks_stored"]) == (0, 0, 0)
    assert server.metric("vllm:lmcache_store_load_failed_total") == 0
