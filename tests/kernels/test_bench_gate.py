"""The benches report nothing unless the result is right."""

import importlib.util
import subprocess
from types import ModuleType

import pytest
import torch

from tests.kernels.interpreter import ROOT, run_python


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_bench_harness", ROOT / "kernels/benchmarks/harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_differing_bit_is_red(harness: ModuleType) -> None:
    right = torch.zeros(8, dtype=torch.bfloat16)
    harness.gate("case", [right], [right.clone()])
    with pytest.raises(harness.RedGate, match="case: tensor 0 differs"):
        harness.gate("case", [right], [torch.tensor([0.0] * 7 + [-0.0], dtype=torch.bfloat16)])


BROKEN = """
import runpy
import sys

from lmcache_kernels.gather_paged import copies

sys.argv = ["bench_paged"]
copies.gather_paged = lambda cache, slots, chunk, *, heads=None: None
runpy.run_path("kernels/benchmarks/bench_paged", run_name="__main__")
"""


@pytest.mark.slow
def test_a_bench_of_a_broken_kernel_gives_no_figures() -> None:
    run = run_python("-c", BROKEN)
    assert run.returncode == 1
    assert "no figures: gather fused HND, N 128: tensor 0 differs" in run.stderr
    assert "GB/s" not in run.stdout


@pytest.mark.slow
def test_the_gpu_check_says_so_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run scripts/gpu_check")
    run = subprocess.run(["scripts/gpu_check"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0
    assert "no GPU here" in run.stdout
