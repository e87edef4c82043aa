"""`python -m lmcache_cli` is the command line, whatever else is called `lmcache` on this machine."""

import sys

from lmcache_cli.app import main

sys.exit(main())
