"""The store: what is where, what is present, what is sound. Joins the format with a back-end; knows no torch.

    with Store.open("/var/cache/kv") as store, store.namespace(identity) as namespace:
        match = namespace.match(token_ids)
        buffers, result = namespace.load(match)      # result.num_tokens were read, every byte verified
        keys = buffers[0].array(layer=0, side="k")   # [H, T, D]; bf16 as uint16 bits

May import `lmcache_format` and `lmcache_cli.backends`, and nothing else of the project.
"""

from .chunk import ChunkBuffer
from .errors import (
    IncompleteListing,
    NoStore,
    NoSuchNamespace,
    Refused,
    StoreDamaged,
    StoreError,
    StoreExists,
    StoreTooNew,
)
from .events import Event, Events
from .live_index import WriterOptions
from .matching import ChunkRef, Match, ReadResult
from .namespace import Namespace, PutStatus
from .reading import Fault, ReadFault
from .state import Entry, State
from .store import Store

__all__ = [
    "ChunkBuffer",
    "ChunkRef",
    "Entry",
    "Event",
    "Events",
    "Fault",
    "IncompleteListing",
    "Match",
    "Namespace",
    "NoStore",
    "NoSuchNamespace",
    "PutStatus",
    "ReadFault",
    "ReadResult",
    "Refused",
    "State",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreExists",
    "StoreTooNew",
    "WriterOptions",
]
