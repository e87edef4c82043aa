"""A directory on this machine, or on a network file system mounted there.

`backend.py` is the whole in one place. Below it: `root.py` the pinned directory and names under it, `staging.py` where
a write happens, `writing.py` its bytes, `publishing.py` its name, `durability.py` how names outlive a power cut,
`reading.py` the handle, `listing.py` the walk, `removing.py` deletion of one version, `clock.py` the store's time,
`syscalls.py` the calls themselves, `oserrors.py` what their errors mean.
"""

from lmcache_cli.backends.local.backend import LocalBackend, open_url

__all__ = ["LocalBackend", "open_url"]
