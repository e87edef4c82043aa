"""The toolkit around persistent KV caches: command line, integrations, runtime, store, back-ends.

Imports run one way: `commands → integration → runtime → store → backends`, with `lmcache_format` (bytes and their
meaning) and `lmcache_kernels` (tensors) below. Importing this package imports nothing else.
"""

__version__ = "0.1.0"
