"""The examples run, and docs/python.md says what they do."""

import ast
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

EXAMPLES = ROOT / "docs" / "examples"
PYTHON = ROOT / "docs" / "python.md"


def _python_blocks(*kinds):
    return [block.text for block in blocks(PYTHON) if block.info in kinds]


def _run_blocks(texts):
    names = {}
    for text in texts:
        exec(compile(text, str(PYTHON), "exec"), names)  # noqa: S102


def test_the_blocks_of_python_md_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _run_blocks(_python_blocks("python"))
    assert "'stored': 3" in capsys.readouterr().out


@pytest.mark.slow
def test_the_torch_blocks_of_python_md_run_as_well(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    _run_blocks(_python_blocks("python", "python torch"))


def test_blocks_that_need_a_model_are_lines_of_the_example():
    example = (EXAMPLES / "continue_from_store.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in example.splitlines()}
    for text in _python_blocks("python model"):
        ast.parse(text)
        assert [line for line in text.splitlines() if line.strip() not in lines] == []


def test_write_and_read_runs(tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "write_and_read.py", tmp_path / "kv"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "document: chunk 2 of 8 tokens: stored" in ran.stdout
    assert "document: chunk 2 of 8 tokens: present" in ran.stdout
    assert "40 of 43 tokens, 3 chunks" in ran.stdout
    assert "16 of 33 tokens, 1 chunks" in ran.stdout


def test_write_and_read_does_without_torch():
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(), run_name='__main__'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, EXAMPLES / "write_and_read.py"], check=True, stdout=subprocess.DEVNULL)


def test_continue_from_store_says_how_it_is_called():
    ran = subprocess.run([sys.executable, "-m", "py_compile", EXAMPLES / "continue_from_store.py"], check=False)
    assert ran.returncode == 0
