"""What this package logs goes where vLLM's own log goes."""

from __future__ import annotations

import logging

OURS = "lmcache"
THEIRS = "vllm"


def join_engine_log() -> None:
    """Give our loggers vLLM's handlers and level, unless the application has set up logging for them. Twice is fine."""
    ours, theirs = logging.getLogger(OURS), logging.getLogger(THEIRS)
    if logging.getLogger().handlers or ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
