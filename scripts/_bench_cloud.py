"""The cases of `scripts/bench_cloud`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from _bench import ROOT, Row, Sample, row
from _bench_store import Filled, against, big_identity, small_identity

sys.path.insert(0, str(ROOT))

from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_format import Identity
from tests import servers
from tests.listing_server import listing_server

BENCH = "cloud"
MIB = 1 << 20
CONCURRENCY = MigrateOptions().concurrency
NUM_LISTED = 1_000_000
_KINDS: dict[str, tuple[Callable[[], Identity], int]] = {"6 MB": (small_identity, 48), "32 MiB": (big_identity, 12)}
_LEAN = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


def rows(groups: Sequence[str], directory: Path | None, repeat: int) -> Iterator[Row]:
    """Rows of the groups asked for."""
    with tempfile.TemporaryDirectory(prefix="bench-cloud-", dir=directory) as scratch:
        for group in groups:
            yield from _GROUPS[group](Path(scratch) / group, repeat)
            shutil.rmtree(Path(scratch) / group, ignore_errors=True)


@contextmanager
def _bucket(directory: Path) -> Iterator[servers.Bucket]:
    """A bucket of a SeaweedFS of its own, and the environment in which AWS programs may use it."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=servers.S3_KEY,
        AWS_SECRET_ACCESS_KEY=servers.S3_SECRET,
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
    )
    server = servers.s3_server(directory / "server")
    server.start()
    try:
        yield servers.Bucket("s3", server, servers.make_s3_bucket(server.endpoint))
    finally:
        server.kill()


def _upload(directory: Path, repeat: int) -> Iterator[Row]:
    for name, (identity, num_shards) in _KINDS.items():
        place = directory / name.replace(" ", "")
        with _bucket(place) as bucket:
            filled = Filled(place / "store", identity(), num_shards)
            yield _upload_row(f"migrate to S3, {num_shards} x {name}", filled, bucket, repeat)
        shutil.rmtree(place)


def _upload_row(case: str, filled: Filled, bucket: servers.Bucket, repeat: int) -> Row:
    variants = {f"s3fs {kind}": _bare_upload(filled, bucket, config) for kind, config in _configs().items()}
    samples = _rounds({**variants, "ours": _migration(filled, bucket)}, repeat)
    gigabytes = sum(path.stat().st_size for path in filled.files) / 1e9
    return replace(against(case, samples, gigabytes, 0.80, f"{CONCURRENCY} at once"), bench=BENCH)


def _configs() -> dict[str, dict[str, str]]:
    return {"as it comes": {}, "without checksums": _LEAN}


Work = Callable[[], object]
Prepare = Callable[[], Work]


def _rounds(variants: dict[str, Prepare], repeat: int) -> dict[str, Sample]:
    """Seconds of what every variant prepares, another one first in each round, on a disk that has nothing to write."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeat + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            work = variants[name]()
            os.sync()
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: Sample.of(values) for name, values in seconds.items()}


def _bare_upload(filled: Filled, bucket: servers.Bucket, config: dict[str, str]) -> Prepare:
    """All files by one call of s3fs, which neither looks what is there nor checks anything."""
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=bucket.server.endpoint, config_kwargs=config, skip_instance_cache=True)
    sources, turn = [str(path) for path in filled.files], count()

    def prepare() -> Work:
        place = f"{bucket.name}/bare-{id(files)}-{next(turn)}"
        targets = [f"{place}/{path.name}" for path in filled.files]
        return lambda: files.put(sources, targets, batch_size=CONCURRENCY)

    return prepare


def _migration(filled: Filled, bucket: servers.Bucket) -> Prepare:
    """Into an empty store that is open, planned and carried out."""
    turn = count()

    def prepare() -> Work:
        target = Store.create(bucket.url(f"store-{next(turn)}"))

        def work() -> None:
            plan = plan_migrate(filled.store, target, MigrateOptions(concurrency=CONCURRENCY))
            result = apply_migrate(filled.store, target, plan)
            assert result.is_whole, result
            assert result.num_copied == filled.count, result

        return work

    return prepare


# The kernel's own high-water mark: ru_maxrss of a child starts with what its parent had in memory.
_MIGRATE = """
import sys
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from tests.peak_memory import peak_bytes
source, target, concurrency, delete_source = sys.argv[1:]
with Store.open(source) as here, Store.create(target) as there:
    plan = plan_migrate(here, there, MigrateOptions(concurrency=int(concurrency), delete_source=delete_source == "yes"))
    assert apply_migrate(here, there, plan).num_copied == plan.num_shards
print(peak_bytes())
"""


def _memory(directory: Path, repeat: int) -> Iterator[Row]:
    with _bucket(directory) as bucket:
        for name, (identity, num_shards) in _KINDS.items():
            for concurrency in (1, CONCURRENCY, 4 * CONCURRENCY):
                place = directory / f"{name.replace(' ', '')}-{concurrency}"
                filled = Filled(place, identity(), max(num_shards, 2 * concurrency))
                most = concurrency * max(path.stat().st_size for path in filled.files) + 128 * MIB
                target = bucket.url(place.name)
                peak = int(_in_child("-c", _MIGRATE, str(place), target, str(concurrency), "yes"))
                yield row(
                    BENCH,
                    f"migrate --delete-source to S3, {name}, {concurrency} at once, peak memory",
                    peak / MIB,
                    "MiB",
                    limit=most / MIB,
                    at_most=1.0,
                    note="limit: shards under way + 128 MiB",
                )
                shutil.rmtree(place)


def _listing(directory: Path, repeat: int) -> Iterator[Row]:
    for scheme, options in (("s3", ""), ("gs", "&token=anon")):
        with listing_server(NUM_LISTED) as endpoint:
            url = f"{scheme}://bucket/place?endpoint_url={endpoint}{options}"
            seen, peak, seconds = _in_child("-m", "tests.backends.listing_memory", url).split()
        assert int(seen) == NUM_LISTED, seen
        case, note = f"listing of {NUM_LISTED:,} objects, {scheme}", f"{float(seconds):.0f} s"
        yield row(BENCH, f"{case}, peak memory", int(peak) / 1e6, "MB", at_most=500, note=note)


def _in_child(*arguments: str) -> str:
    environment = {"AWS_ACCESS_KEY_ID": "some", "AWS_SECRET_ACCESS_KEY": "some", **os.environ}
    done = subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    return done.stdout.strip()


_GROUPS: dict[str, Callable[[Path, int], Iterator[Row]]] = {"upload": _upload, "memory": _memory, "listing": _listing}
