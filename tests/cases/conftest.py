"""The command line, run as people, pipes and cron do, for the cases that end there."""

from tests.cli.conftest import fake, inside, lmcache, made_store

__all__ = ["fake", "inside", "lmcache", "made_store"]
