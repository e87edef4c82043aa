"""What every test may use: the small real model, hypothesis profiles, repeatable torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "fast"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct (bf16, tokenizer, chat template); made on first use, about 20 s."""
    made = subprocess.run(
        [ROOT / "scripts" / "get_model"], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    return Path(made.stdout.strip())
