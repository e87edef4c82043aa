"""Several stores as one: the nearest answers, what is further away comes nearer, and none can hold a reader up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.backends import NoSpace
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, FlipBit, Hold, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.store import NoStore, NoSuchNamespace, Refused, Store, WriterOptions
from lmcache_cli.store.acceptances import read_acceptances, write_acceptance
from lmcache_cli.store.chain import Answer, ChainedNamespace, ChainOptions, StoreChain
from lmcache_cli.store.events import Event
from lmcache_cli.store.far import FarOptions
from lmcache_cli.store.index import Index
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_cli.store.promotion import PromotionOptions
from lmcache_cli.store.reading import Fault as Kind
from lmcache_cli.store.reading import read_header
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.acceptance import Acceptance
from lmcache_format.encodings import get_encoding, resolve_encoding
from lmcache_format.geometry import rank_part
from lmcache_format.segment import RemoveReason
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document, put_document, refs, small_buffer, tiny_identity
from tests.store.pattern import hit as pattern_hit

NUM_CHUNKS = 5
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS + 3)
NUM_SHARDS = NUM_CHUNKS + 1
PROMOTION = PromotionOptions(min_free_bytes=0)


class World:
    """A store in a directory with one in memory behind it, on which faults can be brought."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = MemoryBackend("far")
        self.script = FaultScript()
        self.near = Store.create(str(root))
        self.far = Store.create(self.memory)

    def chain(self, *, promotion: PromotionOptions = PROMOTION, near: Any = None, **far: Any) -> StoreChain:
        options = ChainOptions(FarOptions(**{"timeout_s": 10.0, **far}), promotion)
        return StoreChain(Store.open(near or str(self.root)), [FaultBackend(self.memory, self.script)], options)

    def break_far(self, *faults: Fault) -> None:
        self.script.faults = faults
        self.script._matched = [0] * len(faults)

    @property
    def far_calls(self) -> int:
        return sum(self.script.calls.values())

    def archive(self, **options: Any) -> None:
        done = apply_migrate(self.near, self.far, plan_migrate(self.near, self.far, MigrateOptions(**options)))
        assert done.is_whole

    def near_shards(self) -> dict[str, bytes]:
        found = (self.root / "ns").rglob("*.safetensors")
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}

    def far_objects(self) -> dict[str, bytes]:
        return {info.name: self.memory.read(info.name) for info in self.memory.list()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "near")
    yield made
    made.near.close()
    made.far.close()


@pytest.fixture
def archived(world: World) -> World:
    """All of the document is in the far store, and nothing of it in the near one."""
    with world.near.namespace(KV_IDENTITY, create=True, writer=WriterOptions(producer={"engine": "made"})) as namespace:
        put_kv(namespace, TOKENS)
    world.archive(delete_source=True)
    assert (alone(world.near), alone(world.far)) == (0, len(TOKENS))
    return world


def alone(store: Store, **how: Any) -> int:
    with store.namespace(KV_IDENTITY, missing_ok=True, **how) as namespace:
        return read_kv(namespace, TOKENS)


def read_and_promote(chain: StoreChain, **how: Any) -> int:
    with chain.namespace(KV_IDENTITY, **how) as namespace:
        found = read_kv(namespace, TOKENS)
        assert namespace.wait_promoted(10)
        return found


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_what_was_archived_is_answered_and_comes_nearer(archived: World) -> None:
    before = archived.far_objects()
    with archived.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        assert namespace.match(TOKENS).num_tokens == len(TOKENS)
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert namespace.wait_promoted(10)
        assert chain.events[Event.FAR_READ] == chain.events[Event.PROMOTED] == NUM_SHARDS
        calls = archived.far_calls
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert archived.far_calls == calls
        assert chain.events[Event.FAR_READ] == NUM_SHARDS
    assert alone(archived.near) == len(TOKENS)
    assert verify(archived.near).is_sound
    assert archived.far_objects() == before


def test_a_promotion_is_a_copy_of_the_shard(archived: World) -> None:
    """Encoding, producer and provenance stay; the nonce is another one, since that write was removed here."""
    before = {name: read_header(archived.memory.open_read(name)) for name in archived.far_objects() if "/c/" in name}
    with archived.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    near = LocalBackend(str(archived.root))
    after = {name: read_header(near.open_read(name)) for name in archived.near_shards()}
    assert after.keys() == before.keys()
    for name, header in after.items():
        assert header.meta.producer == {"engine": "made"}
        assert header.checksums == before[name].checksums
        assert header.meta.nonce != before[name].meta.nonce
        assert header.meta.provenance is not None
        assert header.meta.provenance["nonce"] == before[name].meta.nonce


def test_into_an_empty_store_bytes_are_the_same(world: World) -> None:
    with world.far.namespace(KV_IDENTITY, create=True, writer=WriterOptions(encoding="bfx")) as namespace:
        put_kv(namespace, TOKENS)
    with world.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    shards = world.near_shards()
    assert len(shards) == NUM_SHARDS
    assert all(name.endswith(".bfx.safetensors") for name in shards)
    assert all(content == world.memory.read(name) for name, content in shards.items())
    assert (world.root / f"ns/{KV_IDENTITY.fingerprint}/ns.json").exists()


@pytest.mark.parametrize("in_near", [{0, 1}, {2, 3, 5}, {0, 2, 4}, {5}, set()])
def test_a_prefix_may_lie_in_pieces(world: World, in_near: set[int]) -> None:
    chunks = refs(KV_IDENTITY, TOKENS)
    for store, mine in ((world.near, in_near), (world.far, set(range(NUM_SHARDS)) - in_near)):
        with store.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
            state = namespace.state()
            wrong = [entry for entry in map(state.entry, range(len(state))) if entry.depth not in mine]
            for entry in wrong:
                namespace.remove(entry, RemoveReason.PRUNED)
    with world.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        match = namespace.match(TOKENS)
        assert match.num_tokens == len(TOKENS)
        assert match.chunks() == chunks
        answers = {
            depth: answer.url
            for answer in namespace.answers(match)
            for depth in range(NUM_SHARDS)
            if answer.start <= depth * CHUNK_TOKENS < answer.stop
        }
        assert {depth for depth, url in answers.items() if url == chain.url} == in_near
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert chain.events[Event.FAR_READ] == NUM_SHARDS - len(in_near)
        assert namespace.match([*TOKENS[: 2 * CHUNK_TOKENS], 1, 2]).num_tokens == 2 * CHUNK_TOKENS


def test_which_store_answers_is_told(archived: World) -> None:
    with archived.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS[: 2 * CHUNK_TOKENS])
    with archived.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        middle = 2 * CHUNK_TOKENS
        assert namespace.answers(namespace.match(TOKENS)) == [
            Answer(archived.near.url, 0, middle),
            Answer(archived.memory.url, middle, len(TOKENS)),
        ]


def test_identity_and_salt_decide_behind_as_well(archived: World) -> None:
    with archived.chain() as chain:
        with chain.namespace(tiny_identity(name="other", layers=2, kv_heads=4, head_dim=32, chunk_tokens=32)) as other:
            assert other.match(TOKENS).num_tokens == 0
        with chain.namespace(KV_IDENTITY) as namespace:
            assert namespace.match(TOKENS, salt="tenant").num_tokens == 0
            assert namespace.match([1, *TOKENS[1:]]).num_tokens == 0


def test_lossy_is_read_and_promoted_where_it_is_allowed_alone(world: World) -> None:
    with world.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    world.archive(encoding=resolve_encoding("uq"), allow_lossy=True, delete_source=True)
    with world.chain() as chain:
        with chain.namespace(KV_IDENTITY) as namespace:
            assert namespace.match(TOKENS).num_tokens == 0
        with chain.namespace(KV_IDENTITY, allow_lossy=True) as namespace:
            _, result = namespace.load(namespace.match(TOKENS))
            assert result.num_tokens == len(TOKENS)
            assert namespace.wait_promoted(10)
    assert {name.rsplit(".", 2)[1] for name in world.near_shards()} == {"uq006-near"}
    assert alone(world.near) == 0


def test_parts_are_fetched_by_ranges_and_promoted_as_parts(archived: World) -> None:
    whole = sum(len(content) for name, content in archived.far_objects().items() if "/c/" in name)
    for rank in (0, 1):
        part = rank_part(KV_IDENTITY, rank, 2)
        with archived.chain() as chain:
            assert read_and_promote(chain, need=part) == len(TOKENS)
            assert chain.events[Event.FAR_BYTES_READ] < 0.6 * whole
            assert chain.events[Event.PROMOTED] == NUM_SHARDS
        assert alone(archived.near, need=part) == len(TOKENS)
    near = LocalBackend(str(archived.root))
    names = archived.near_shards()
    assert {name.rpartition("/")[2].split(".")[1] for name in names} == {"l0-2h0-2", "l0-2h2-4"}
    headers = [read_header(near.open_read(name)) for name in names]
    assert all(header.meta.producer == {"engine": "made"} for header in headers)
    assert all(header.meta.provenance for header in headers)
    assert alone(archived.near) == len(TOKENS)
    assert verify(archived.near).is_sound


def test_parts_are_put_together_from_a_far_store(world: World) -> None:
    for rank in (0, 1):
        with world.far.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS, part=rank_part(KV_IDENTITY, rank, 2))
    with world.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    assert len(world.near_shards()) == 2 * NUM_SHARDS
    assert alone(world.near) == len(TOKENS)


def test_a_third_store_is_asked_last(archived: World, tmp_path: Path) -> None:
    with Store.create(MemoryBackend("middle")) as middle, middle.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS[:CHUNK_TOKENS])
        namespace.flush()
        chain = StoreChain(archived.near, [middle.backend, archived.memory], ChainOptions(promotion=PROMOTION))
        with chain.namespace(KV_IDENTITY) as chained:
            answers = chained.answers(chained.match(TOKENS))
            assert [answer.url for answer in answers] == [middle.url, archived.memory.url]
            assert read_kv(chained, TOKENS) == len(TOKENS)


# ---- what is wrong in front ------------------------------------------------------------------------------------------


def test_a_damaged_copy_in_front_falls_through_and_is_replaced(world: World) -> None:
    with world.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    world.archive()
    for name, content in sorted(world.near_shards().items())[:3]:
        (world.root / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with world.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.READ_DAMAGED] == chain.events[Event.PROMOTED] == 3
    assert len(list((world.root / "quarantine").iterdir())) == 3
    assert alone(world.near) == len(TOKENS)
    assert verify(world.near).is_sound


def test_files_gone_in_front_fall_through(world: World) -> None:
    with world.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    world.archive()
    for name in world.near_shards():
        (world.root / name).unlink()
    with world.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    assert alone(world.near) == len(TOKENS)


def test_an_unreadable_disk_in_front_falls_through_and_nothing_there_changes(world: World) -> None:
    with world.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    world.archive()
    before = world.near_shards()
    near = FaultBackend(LocalBackend(str(world.root)), FaultScript(Fault("read_into", Fail(unavailable()), name="/c/")))
    with world.chain(near=near) as chain:
        assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.FAR_READ] == NUM_SHARDS
        assert chain.events[Event.PROMOTED] == 0
    assert world.near_shards() == before
    assert not (world.root / "quarantine").exists()


# ---- what is wrong behind --------------------------------------------------------------------------------------------


def test_damage_behind_is_a_miss_and_is_never_promoted(archived: World) -> None:
    victim = next(name for name in archived.far_objects() if refs(KV_IDENTITY, TOKENS)[2].key.hex() in name)
    archived.break_far(Fault("read_into", FlipBit(8 * 5000), name=victim))
    before = archived.far_objects()
    with archived.chain() as chain:
        with chain.namespace(KV_IDENTITY) as namespace:
            assert namespace.match(TOKENS).num_tokens == len(TOKENS)
            assert read_kv(namespace, TOKENS) == 2 * CHUNK_TOKENS
            assert namespace.wait_promoted(10)
            assert namespace.match(TOKENS).num_tokens == 2 * CHUNK_TOKENS
    assert victim not in archived.near_shards()
    assert archived.far_objects() == before  # no reader changes the archive
    assert verify(archived.near).is_sound


def test_damage_on_the_way_is_fetched_again(archived: World) -> None:
    archived.break_far(Fault("read_into", FlipBit(8 * 5000), on_call=2, name="/c/"))
    with archived.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.PROMOTED] == NUM_SHARDS
    assert alone(archived.near) == len(TOKENS)


def test_what_is_gone_behind_is_a_miss(archived: World) -> None:
    with archived.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        match = namespace.match(TOKENS)
        for name in [name for name in archived.far_objects() if "/c/" in name]:
            archived.memory.delete(name, version=None)
        _, result = namespace.load(match)
        assert result.num_tokens == 0
        assert namespace.match(TOKENS).num_tokens == 0


def test_match_asks_nothing_of_the_far_store(archived: World) -> None:
    with archived.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        asked = threading.Event()
        archived.break_far(Fault("*", Hold(asked, threading.Event(), timeout_s=3)))
        calls, started = archived.far_calls, time.monotonic()
        for _ in range(20):
            assert namespace.match(TOKENS).num_tokens == len(TOKENS)
        assert archived.far_calls == calls
        for _ in range(20):
            assert namespace.match(document(70, 9)).num_tokens == 0  # what is new there is looked for behind the scenes
        assert time.monotonic() - started < 2.5


def test_a_far_store_that_hangs_is_a_miss_at_the_deadline_and_writes_to_nobodys_buffer(archived: World) -> None:
    go_on = threading.Event()
    with archived.chain(timeout_s=0.2, num_readers=2) as chain, chain.namespace(KV_IDENTITY) as namespace:
        chunk = namespace.match(TOKENS).chunks()[0]
        archived.break_far(Fault("read_into", Hold(threading.Event(), go_on), name="/c/"))
        buffer = small_buffer(KV_IDENTITY, namespace.need, chunk.num_tokens)
        result = namespace.read([chunk], [buffer])
        assert result.num_tokens == 0
        buffer.memory[:] = b"\xa5" * buffer.size_bytes
        go_on.set()
        far = namespace.behind[0]
        deadline = time.monotonic() + 10
        while far._memory.use().leased_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert far._memory.use().leased_bytes == 0
        assert np.frombuffer(buffer.memory, np.uint8).tolist() == [0xA5] * buffer.size_bytes


def test_a_far_store_that_keeps_failing_is_left_alone_then_tried_again(archived: World) -> None:
    now = [0.0]
    with archived.chain(breaker_failures=3, cooldown_s=30.0) as chain, chain.namespace(KV_IDENTITY) as namespace:
        far = namespace.behind[0]
        far.breaker._clock = lambda: now[0]
        match = namespace.match(TOKENS)
        chunk = match.chunks()[0]
        buffer = small_buffer(KV_IDENTITY, namespace.need, chunk.num_tokens)
        archived.break_far(Fault("open_read", Fail(unavailable()), name="/c/"))
        for _ in range(3):
            assert namespace.read([chunk], [buffer]).num_tokens == 0
        calls = archived.far_calls
        assert namespace.match(TOKENS).num_tokens == 0  # nothing is promised that could not be loaded
        assert namespace.read([chunk], [buffer]).num_tokens == 0
        assert archived.far_calls == calls
        archived.break_far()
        assert namespace.match(TOKENS).num_tokens == 0
        now[0] = 31.0
        deadline = time.monotonic() + 10
        while namespace.match(TOKENS).num_tokens == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_kv(namespace, TOKENS) == len(TOKENS)


def test_failures_are_counted_each_and_logged_once(archived: World, caplog: pytest.LogCaptureFixture) -> None:
    archived.break_far(Fault("open_read", Fail(unavailable()), name="/c/"))
    with archived.chain(breaker_failures=100) as chain, chain.namespace(KV_IDENTITY) as namespace:
        match = namespace.match(TOKENS)
        with caplog.at_level(logging.WARNING, "lmcache.store"):
            for _ in range(4):
                assert namespace.load(match.up_to(CHUNK_TOKENS))[1].num_tokens == 0
        assert chain.events[Event.FAR_UNAVAILABLE] == 4
    assert len([one for one in caplog.messages if one.startswith("far_unavailable")]) == 1


def test_a_far_store_that_does_not_answer_at_the_start_is_found_later(archived: World) -> None:
    archived.break_far(Fault("*", Fail(unavailable())))
    with archived.chain(cooldown_s=0.05) as chain, chain.namespace(KV_IDENTITY) as namespace:
        assert namespace.match(TOKENS).num_tokens == 0
        assert chain.events[Event.FAR_UNAVAILABLE] >= 1
        archived.break_far()
        deadline = time.monotonic() + 10
        while namespace.match(TOKENS).num_tokens == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read_kv(namespace, TOKENS) == len(TOKENS)


def test_a_far_store_that_hangs_at_the_start_holds_nobody_up(archived: World) -> None:
    go_on = threading.Event()
    archived.break_far(Fault("list", Hold(threading.Event(), go_on)))
    started = time.monotonic()
    chain = archived.chain(timeout_s=0.2)
    namespace = chain.namespace(KV_IDENTITY)
    assert namespace.match(TOKENS).num_tokens == 0
    namespace.close()
    assert time.monotonic() - started < 10
    go_on.set()


def test_what_was_archived_since_is_heard_of(archived: World) -> None:
    longer = [*TOKENS[: NUM_CHUNKS * CHUNK_TOKENS], *document(2 * CHUNK_TOKENS, 4)]
    with archived.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        with archived.far.namespace(KV_IDENTITY, create=True) as writer:
            put_kv(writer, longer)
        keys = namespace.match(TOKENS).keys
        wanted = type(keys)(b"".join(ref.key for ref in refs(KV_IDENTITY, longer)))
        namespace.hear_of(wanted)
        assert namespace.match_keys(wanted) == len(wanted)


def test_what_cannot_be_is_refused_at_the_start(world: World, tmp_path: Path) -> None:
    with StoreChain(world.near, [str(tmp_path / "nowhere")]) as chain, pytest.raises(NoStore, match="nowhere"):
        chain.namespace(KV_IDENTITY)
    with pytest.raises(Refused, match="stands twice"):
        StoreChain(world.near, [str(world.root)])
    with pytest.raises(Refused, match="no stores"):
        StoreChain.open([])
    with pytest.raises(NoStore):
        StoreChain.open([str(tmp_path / "nowhere"), world.memory])
    with world.chain() as chain:
        with pytest.raises(NoSuchNamespace):
            chain.namespace(KV_IDENTITY, missing_ok=False)
        with chain.namespace(KV_IDENTITY) as empty:
            assert empty.match(TOKENS).num_tokens == 0


def test_headers_are_asked_of_the_store_that_has_the_chunk_and_have_a_deadline(archived: World) -> None:
    with archived.near.namespace(KV_IDENTITY, create=True, writer=WriterOptions(producer={"engine": "near"})) as near:
        put_kv(near, TOKENS[:CHUNK_TOKENS])
    with archived.chain(timeout_s=0.3) as chain, chain.namespace(KV_IDENTITY) as namespace:
        chunks = namespace.match(TOKENS).chunks()
        shards = [(chunk, entry) for chunk in chunks for entry in namespace.shards(chunk.key)]
        engines = [None if meta is None else meta.producer["engine"] for meta in namespace.headers(shards)]
        assert engines == ["near", *["made"] * NUM_CHUNKS]
        go_on = threading.Event()
        archived.break_far(Fault("open_read", Hold(threading.Event(), go_on)))
        started = time.monotonic()
        assert [meta is None for meta in namespace.headers(shards)] == [False, *[True] * NUM_CHUNKS]
        assert time.monotonic() - started < 5
        go_on.set()


def test_what_probes_found_of_the_engines_behind_comes_along(archived: World) -> None:
    found = Acceptance(KV_IDENTITY.fingerprint, {"engine": "made"}, {"engine": "other"}, True, 0.001, 0.999, 64, 1)
    write_acceptance(archived.memory, found)
    with archived.chain(promotion=PromotionOptions(is_on=False)) as chain:
        chain.namespace(KV_IDENTITY).close()
    assert read_acceptances(archived.near.backend, KV_IDENTITY.fingerprint, archived.near.events) == []
    with archived.chain() as chain:
        chain.namespace(KV_IDENTITY).close()
    assert read_acceptances(archived.near.backend, KV_IDENTITY.fingerprint, archived.near.events) == [found]


# ---- promotion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "promotion",
    [
        PromotionOptions(is_on=False),
        PromotionOptions(min_free_bytes=1 << 60),
        PromotionOptions(max_store_bytes=1000, min_free_bytes=0),
    ],
)
def test_nothing_is_promoted_where_there_is_no_room_for_it(archived: World, promotion: PromotionOptions) -> None:
    with archived.chain(promotion=promotion) as chain:
        for _ in range(2):
            assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.PROMOTED] == 0
        assert chain.events[Event.PROMOTION_SKIPPED] == (2 * NUM_SHARDS if promotion.is_on else 0)
    assert archived.near_shards() == {}


def test_promotion_stops_at_the_size_of_the_store(archived: World) -> None:
    sizes = sorted(len(content) for name, content in archived.far_objects().items() if "/c/" in name)
    most = 3 * sizes[-1]
    with archived.chain(promotion=PromotionOptions(max_store_bytes=most, min_free_bytes=0)) as chain:
        assert read_and_promote(chain) == len(TOKENS)
    kept = sum(map(len, archived.near_shards().values()))
    assert 2 * sizes[-1] <= kept <= most


def test_a_full_disk_fails_promotions_once_logged_and_the_read_succeeds(
    archived: World, caplog: pytest.LogCaptureFixture
) -> None:
    near = FaultBackend(LocalBackend(str(archived.root)), FaultScript(Fault("put", Fail(NoSpace("full")), name="/c/")))
    with archived.chain(near=near) as chain, caplog.at_level(logging.WARNING, "lmcache.store"):
        assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.PROMOTION_FAILED] == 1
        assert chain.events[Event.PROMOTION_SKIPPED] == NUM_SHARDS - 1  # it was full a moment ago
    assert len([one for one in caplog.messages if one.startswith("promotion_failed")]) == 1
    assert archived.near_shards() == {}
    with archived.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    assert alone(archived.near) == len(TOKENS)


@pytest.mark.parametrize("error", [unavailable(), OSError("no such device"), ValueError("a surprise")])
def test_a_promotion_that_fails_in_any_way_harms_no_reader(archived: World, error: Exception) -> None:
    near = FaultBackend(LocalBackend(str(archived.root)), FaultScript(Fault("put", Fail(error), name="/c/")))
    with archived.chain(near=near) as chain:
        assert read_and_promote(chain) == len(TOKENS)
        assert chain.events[Event.PROMOTION_FAILED] == NUM_SHARDS


def test_promotions_wait_for_a_slow_disk_without_holding_readers_up(archived: World) -> None:
    reached, go_on = threading.Event(), threading.Event()
    script = FaultScript(Fault("put", Hold(reached, go_on), name="/c/"))
    near = FaultBackend(LocalBackend(str(archived.root)), script)
    with archived.chain(near=near, memory_bytes=8 << 20) as chain, chain.namespace(KV_IDENTITY) as namespace:
        for _ in range(3):
            assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert reached.wait(10)
        assert chain.events[Event.PROMOTED] == 0
        assert chain.events[Event.PROMOTION_SKIPPED] > 0  # more than may wait
        go_on.set()
        assert namespace.wait_promoted(10)
        assert 0 < chain.events[Event.PROMOTED] < NUM_SHARDS
        assert read_kv(namespace, TOKENS) == len(TOKENS)


def test_two_readers_promote_at_once(archived: World) -> None:
    with archived.chain() as one, archived.chain() as other:
        with one.namespace(KV_IDENTITY) as first, other.namespace(KV_IDENTITY) as second:
            threads = [threading.Thread(target=read_kv, args=(reader, TOKENS)) for reader in (first, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert first.wait_promoted(10)
            assert second.wait_promoted(10)
        assert one.events[Event.PROMOTION_FAILED] == other.events[Event.PROMOTION_FAILED] == 0
    assert len(archived.near_shards()) == NUM_SHARDS
    assert alone(archived.near) == len(TOKENS)
    assert verify(archived.near).is_sound


# ---- the archive's own life ------------------------------------------------------------------------------------------


def test_pruning_in_front_leaves_the_archive_alone_and_it_answers_again(archived: World) -> None:
    before = archived.far_objects()
    with archived.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
        with archived.near.namespace(KV_IDENTITY, create=True) as namespace:
            state = namespace.state()
            for row in range(len(state)):
                entry = state.entry(row)
                namespace.remove(entry, RemoveReason.PRUNED)
        assert read_and_promote(chain) == len(TOKENS)  # over shards that are marked, and not yet swept
        assert chain.events[Event.FAR_READ] == 2 * NUM_SHARDS
    sweep(archived.near, grace_ms=0)
    assert alone(archived.near) == len(TOKENS)
    assert archived.far_objects() == before


def test_uses_are_kept_in_front_and_come_to_the_archive_with_the_next_migration(archived: World) -> None:
    with archived.chain() as chain:
        for _ in range(2):
            assert read_and_promote(chain) == len(TOKENS)
    hits = Index(archived.near.backend, KV_IDENTITY.fingerprint).state.touches["hits"]
    assert set(hits.tolist()) == {2}
    archived.archive(encoding=get_encoding("raw"), delete_source=True)
    there = Index(archived.memory, KV_IDENTITY.fingerprint).state.touches["hits"]
    assert set(there.tolist()) == {2}
    assert (archived.near_shards(), alone(archived.far)) == ({}, len(TOKENS))


def test_what_a_store_behind_has_is_written_all_the_same_by_one_who_computed_it(archived: World) -> None:
    with archived.chain() as chain, chain.namespace(KV_IDENTITY, create=True) as namespace:
        keys = namespace.match(TOKENS).keys
        assert (namespace.match_keys(keys), namespace.num_kept(keys)) == (NUM_CHUNKS, 0)
        put_kv(namespace, TOKENS)
        assert namespace.num_kept(keys) == NUM_CHUNKS
    assert alone(archived.near) == len(TOKENS)


def test_what_is_written_goes_to_the_first_store_alone(world: World) -> None:
    before = world.far_objects()
    with world.chain() as chain, chain.namespace(KV_IDENTITY, create=True) as namespace:
        assert isinstance(namespace, ChainedNamespace)
        put_kv(namespace, TOKENS)
        assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert world.far_objects() == before
    assert alone(world.near) == len(TOKENS)


def test_faults_that_come_and_go_never_give_a_wrong_byte(archived: World) -> None:
    effects = [Fail(unavailable()), FlipBit(8 * 4500), Fail(OSError("reset"))]
    archived.script.faults = ()
    with archived.chain(breaker_failures=1000) as chain, chain.namespace(KV_IDENTITY) as namespace:
        for number, effect in enumerate(effects * 4):
            archived.break_far(Fault("read_into", effect, on_call=1 + number % 5, name="/c/"))
            found = read_kv(namespace, TOKENS)
            assert found % CHUNK_TOKENS == 0 or found == len(TOKENS)
        archived.break_far()
        assert namespace.wait_promoted(10)
        assert chain.events[Event.PROMOTION_FAILED] == 0
    with archived.chain() as chain:
        assert read_and_promote(chain) == len(TOKENS)
    assert verify(archived.near).is_sound


def test_a_fault_of_the_first_store_is_told_where_nobody_has_the_chunk(world: World) -> None:
    with world.near.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS[:CHUNK_TOKENS])
    with world.chain() as chain, chain.namespace(KV_IDENTITY) as namespace:
        match = namespace.match(TOKENS)
        for name in world.near_shards():
            (world.root / name).unlink()
        _, result = namespace.load(match)
        assert result.fault is not None
        assert result.fault.fault is Kind.MISSING


def test_patterns_of_odd_sizes_go_through(world: World) -> None:
    identity = tiny_identity(layers=3, kv_heads=3, head_dim=6, chunk_tokens=5)
    tokens = document(23, 2)
    with world.far.namespace(identity, create=True) as namespace:
        put_document(namespace, tokens)
    with world.chain() as chain, chain.namespace(identity) as namespace:
        assert pattern_hit(namespace, tokens) == len(tokens)
        assert namespace.wait_promoted(10)
    with world.near.namespace(identity) as namespace:
        assert pattern_hit(namespace, tokens) == len(tokens)
