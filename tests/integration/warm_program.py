"""The command line with pattern KV for models, and a fake vLLM: `python warm_program.py MODE warm …`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lmcache_cli.app import main
from lmcache_cli.integration.vllm import engine_process
from tests.cases.pattern_engine import install

if __name__ == "__main__":
    install(setattr, 0.0)
    fake = Path(__file__).parent / "vllm" / "fake_prefilling.py"
    engine_process.COMMAND = (sys.executable, str(fake), sys.argv.pop(1))
    sys.exit(main())
