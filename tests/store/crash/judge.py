"""What must hold of a store whose writer was killed, whenever that was."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lmcache_cli.backends import open_backend
from lmcache_cli.store import Namespace, NoStore, NoSuchNamespace, Store
from lmcache_cli.store.reading import read_header, verify_data
from lmcache_format.errors import BadName, ChecksumMismatch
from lmcache_format.identity import Identity
from lmcache_format.names import (
    SegmentName,
    ShardName,
    parse_identity_path,
    parse_superblock_path,
)
from lmcache_format.segment import decode_segment
from tests.store.crash.workloads import IDENTITY, Flush, Put, Remove, Workload, options, perform
from tests.store.pattern import hit, small_buffer, wrong_elements


def judge(workload: Workload, root: Path, returned: Sequence[int]) -> None:
    """Raise AssertionError unless nothing is wrong, nothing committed is lost and life goes on by itself."""
    check_files(root, may_be_damaged=workload.is_broken)
    _check_promises(workload, root, returned)
    perform(workload, root, memoryview(bytearray(len(workload.steps))))
    _check_complete(workload, root)
    _check_staging(root)


def check_files(root: Path, identity: Identity = IDENTITY, *, may_be_damaged: bool = False) -> None:
    """Every file has the name of something and is that, whole and sound."""
    backend = open_backend(str(root))
    for info in list(backend.list("")):
        name = info.name
        if name.startswith(("tmp/", "quarantine/")) or name == "CACHEDIR.TAG":
            continue
        for check in (_check_shard, _check_segment, _check_identity, _check_superblock):
            try:
                check(root, name, identity)
                break
            except BadName:
                continue
            except ChecksumMismatch:
                assert may_be_damaged, name
                break
        else:
            raise AssertionError(f"{name} is nothing a store holds")
    backend.close()


def _check_shard(root: Path, name: str, identity: Identity) -> None:
    assert ShardName.parse(name).fingerprint == identity.fingerprint
    backend = open_backend(str(root))
    with backend.open_read(name) as handle:
        header = read_header(handle)
        verify_data(handle, header)
        assert ShardName(header.meta.fingerprint, header.meta.key, header.meta.part, "raw").path == name
    backend.close()


def _check_segment(root: Path, name: str, identity: Identity) -> None:
    assert SegmentName.parse(name).fingerprint == identity.fingerprint
    decode_segment((root / name).read_bytes(), identity.fingerprint)


def _check_identity(root: Path, name: str, identity: Identity) -> None:
    assert parse_identity_path(name) == identity.fingerprint
    assert (root / name).read_bytes() == identity.canonical_json()


def _check_superblock(root: Path, name: str, identity: Identity) -> None:
    assert parse_superblock_path(name) == 1
    Store.open(str(root)).close()


def _check_promises(workload: Workload, root: Path, returned: Sequence[int]) -> None:
    """No byte is wrong, and what was promised before the crash is there after it."""
    try:
        store = Store.open(str(root))
    except NoStore:
        assert workload.name == "create"
        assert not any(returned)
        return
    with store:
        try:
            namespace = store.namespace(IDENTITY)
        except NoSuchNamespace:
            assert not workload.prepared
            assert not any(returned)
            return
        with namespace:
            _check_index(workload, namespace, returned)
            for number in range(len(workload.documents)):
                tokens = workload.tokens(number)
                assert hit(namespace, tokens) >= _promised_tokens(workload, number, returned)
                _check_single_chunks(workload, namespace, number)


def _promised_tokens(workload: Workload, number: int, returned: Sequence[int]) -> int:
    """Full chunks count once their put returned, also of other documents; a tail once it was flushed, too."""
    promised = 0
    put, flushed = committed(workload, returned)
    size = IDENTITY.chunk_tokens
    for ref in workload.chunks(number):
        if ref.key not in (put if ref.num_tokens == size else flushed):
            break
        promised += ref.num_tokens
    return promised


def committed(workload: Workload, returned: Sequence[int]) -> tuple[set[bytes], set[bytes]]:
    """Keys of chunks of which every put returned, and of those that were flushed after it. Removed ones are in none."""
    doubtful = {ref.key for number in workload.removable for ref in workload.chunks(number)}
    before = {ref.key for number in workload.prepared for ref in workload.chunks(number) if not workload.is_broken}
    put: set[bytes] = set()
    flushed: set[bytes] = set()
    halves: dict[bytes, int] = {}
    for step, done in zip(workload.steps, returned, strict=True):
        if not done:
            break
        if isinstance(step, Put):
            key = workload.chunks(step.document)[step.index].key
            halves[key] = halves.get(key, 0) + 1
            if step.part is None or halves[key] == 2:
                put.add(key)
        elif isinstance(step, Flush):
            flushed = set(put)
    return (put | before) - doubtful, (flushed | before) - doubtful


def _check_index(workload: Workload, namespace: Namespace, returned: Sequence[int]) -> None:
    """Flushed entries are in the index itself, and what was removed and flushed is not."""
    state = namespace.state()
    for key in committed(workload, returned)[1]:
        assert state.rows_of(key), f"{key.hex()} was flushed and is not in the index"
    removed = []
    for step, done in zip(workload.steps, returned, strict=True):
        if done and isinstance(step, Remove):
            removed.append(workload.chunks(step.document)[step.index].key)
        elif done and isinstance(step, Flush):
            for key in removed:
                assert not state.rows_of(key), f"{key.hex()} was removed and is in the index"


def _check_single_chunks(workload: Workload, namespace: Namespace, number: int) -> None:
    """Chunks beyond a gap are right or absent, too."""
    tokens = workload.tokens(number)
    for ref in workload.chunks(number):
        buffer = small_buffer(IDENTITY, namespace.need, ref.num_tokens)
        if namespace.read([ref], [buffer]).num_chunks:
            start = ref.depth * IDENTITY.chunk_tokens
            own = tokens[start : start + ref.num_tokens]
            assert wrong_elements(IDENTITY, buffer, own, start) == 0


def _check_complete(workload: Workload, root: Path) -> None:
    """Another writer did the same work after the crash: all of it is there."""
    with Store.open(str(root)) as store, store.namespace(IDENTITY, writer=options(workload)) as namespace:
        touched = {step.document for step in workload.steps if isinstance(step, Put)}
        for number in {*workload.prepared, *touched} - set(workload.removable):
            tokens = workload.tokens(number)
            assert hit(namespace, tokens) == len(tokens)
    check_files(root)


def _check_staging(root: Path) -> None:
    """What the dead left half-written goes when somebody collects it."""
    with Store.open(str(root)) as store:
        store.backend.collect_staging(older_than_ms=0)
    left = [name for name in os.listdir(root / "tmp") if not _is_of_living(name)]
    assert not left, left


def _is_of_living(name: str) -> bool:
    """The number of a dead process may belong to a living one by now; its staging is then kept for a day."""
    match = re.fullmatch(r"[a-z0-9-]+\.(\d+)\.[0-9a-f]{16}", name)
    return match is not None and Path(f"/proc/{match[1]}").exists()
