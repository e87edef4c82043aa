"""C28: buffers that are used again while a write or a read is still on its way."""

from __future__ import annotations

import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, Hold
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import ChunkBuffer, Namespace, Store, WriterOptions
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.integration.vllm.fakes import FakeEngine
from tests.store.pattern import (
    document,
    hit,
    pattern,
    put_chunk,
    put_document,
    refs,
    small_buffer,
    tiny_identity,
    wrong_elements,
)

IDENTITY = tiny_identity()
PROMPTS = [document(4, seed) for seed in range(40)]
INTERLEAVINGS = 1_000
THREADS = 4
POISON = 0xDB


def poison(buffer: ChunkBuffer) -> None:
    buffer.memory[:] = bytes([POISON]) * buffer.size_bytes


def test_a_key_is_invisible_until_its_write_is_complete(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s")).close()
    hold = Hold(threading.Event(), threading.Event())
    script = FaultScript(Fault("put", hold, name=".safetensors"))
    with Store.open(FaultBackend(LocalBackend(tmp_path / "s"), script)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            (ref,) = refs(IDENTITY, PROMPTS[0])
            writer = threading.Thread(target=put_chunk, args=(namespace, ref, PROMPTS[0]))
            writer.start()
            assert hold.reached.wait(30)
            assert namespace.match(PROMPTS[0]).num_tokens == 0
            with Namespace(LocalBackend(tmp_path / "s"), IDENTITY) as other:
                assert other.match(PROMPTS[0]).num_tokens == 0
                hold.go_on.set()
                writer.join(30)
                assert hit(other, PROMPTS[0]) == 4
            assert hit(namespace, PROMPTS[0]) == 4


class Pool:
    """Four buffers for everybody: whoever gives one back poisons it, as the next user would."""

    def __init__(self) -> None:
        self.free: queue.Queue[ChunkBuffer] = queue.Queue()
        for _ in range(4):
            self.free.put(small_buffer(IDENTITY, whole_part(IDENTITY), 4))


def interleave(namespace: Namespace, pool: Pool, seed: int, problems: list[BaseException]) -> None:
    chance = random.Random(seed)
    try:
        for _ in range(INTERLEAVINGS // THREADS):
            tokens = chance.choice(PROMPTS)
            (ref,) = refs(IDENTITY, tokens)
            buffer = pool.free.get(timeout=30)
            if chance.random() < 0.5:
                buffer.fill(pattern(IDENTITY, whole_part(IDENTITY), tokens, 0))
                namespace.put(buffer, key=ref.key, parent=ref.parent, depth=0)
            else:
                result = namespace.read([ref], [buffer])
                if result.num_chunks:
                    assert wrong_elements(IDENTITY, buffer, tokens, 0) == 0
            poison(buffer)
            pool.free.put(buffer)
    except BaseException as problem:
        problems.append(problem)


@pytest.mark.parametrize("encoding", ["raw", "bfx"])
def test_a_thousand_interleavings_over_four_buffers(tmp_path: Path, encoding: str) -> None:
    problems: list[BaseException] = []
    pool = Pool()
    with Store.create(str(tmp_path / "s")) as store:
        options = WriterOptions(encoding=encoding)
        with store.namespace(IDENTITY, create=True, writer=options) as namespace:
            threads = [
                threading.Thread(target=interleave, args=(namespace, pool, seed, problems)) for seed in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not problems
            written = [tokens for tokens in PROMPTS if hit(namespace, tokens) == 4]
            assert len(written) > 30
        assert pool.free.qsize() == 4


def test_no_thread_writes_to_the_buffers_of_an_interrupted_read(tmp_path: Path) -> None:
    """Ctrl-C while reads are on their way: it is raised when they have ended, so that buffers can be used again."""
    tokens = document(32, 28)
    root = tmp_path / "s"
    with Store.create(str(root)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, tokens)
    hold = Hold(threading.Event(), threading.Event())
    script = FaultScript(Fault("read_into", hold, name=".safetensors"))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store, store.namespace(IDENTITY) as namespace:
        chunks = namespace.match(tokens).chunks()
        buffers = [small_buffer(IDENTITY, namespace.need, 4) for _ in chunks]
        main = threading.get_ident()

        def interrupt() -> None:
            assert hold.reached.wait(30)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.3)
            hold.go_on.set()

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            namespace.read(chunks, buffers)
        assert hold.go_on.is_set()
        for buffer in buffers:
            poison(buffer)
        other.join()
        time.sleep(0.2)
        assert all(set(buffer.memory) == {POISON} for buffer in buffers)
        assert namespace.read(chunks, buffers).num_tokens == 32


# ---- the connector: four buffers for saves, four for loads ----------------------------------------------------------


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_a_buffer_belongs_to_its_write_until_that_is_over(
    engine_of: Callable[..., FakeEngine], store_dir: Path, identity: Identity, load_async: bool
) -> None:
    """The write of A is held; the engine gives A's blocks to B … E, which take the other buffers, and more than there
    are."""
    prompts = [document(8, seed) for seed in range(100, 106)]
    hold = Hold(threading.Event(), threading.Event())
    fault = Fault("put", hold, name=refs(identity, prompts[0])[0].key.hex())
    engine = engine_of(
        worker_backend=lambda: FaultBackend(LocalBackend(store_dir), FaultScript(fault)),
        load_async=load_async,
        num_blocks=3,
        save_buffers=4,
    )
    engine.add("A", prompts[0])
    while engine.requests:
        engine.step()
    assert hold.reached.wait(30)
    for number, prompt in enumerate(prompts[1:]):
        engine.add(f"{number}", prompt)
        while engine.requests:
            engine.step()
    (rank,) = engine.ranks
    assert rank.worker.counts["save_no_memory"] == 2
    with Store.open(str(store_dir)) as store, store.namespace(identity, missing_ok=True) as namespace:
        assert namespace.match(prompts[0]).num_tokens == 0
    hold.go_on.set()
    engine.until_idle()
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        assert [hit(namespace, prompt) for prompt in prompts] == [8] * 4 + [0] * 2
    engine.assert_at_rest()


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_a_buffer_belongs_to_its_read_until_that_is_over(
    engine_of: Callable[..., FakeEngine], store_dir: Path, identity: Identity, load_async: bool
) -> None:
    """The read of A is held and given up; B … E are loaded through the other buffers, into A's blocks. What the late
    read brings goes nowhere."""
    prompts = [document(9, seed) for seed in range(110, 115)]
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        for prompt in prompts:
            put_document(namespace, prompt, tail=False)
    hold = Hold(threading.Event(), threading.Event())
    fault = Fault("read_into", hold, name=refs(identity, prompts[0])[0].key.hex(), on_call=1)
    engine = engine_of(
        worker_backend=lambda: FaultBackend(LocalBackend(store_dir), FaultScript(fault)),
        load_async=load_async,
        load_timeout_s=0.5,
        num_blocks=3,
        save=False,
        prefix_caching=False,
    )
    late = engine.run("A", prompts[0])
    assert hold.reached.is_set()
    pool = engine.ranks[0].pools[1 if load_async else 0]
    assert pool.num_leased == 1
    for number, prompt in enumerate(prompts[1:]):
        assert engine.run(f"{number}", prompt).promised == [8]
    hold.go_on.set()
    again = engine.run("A again", prompts[0])
    assert again.output == late.output
    assert engine.undetected == 0
    assert engine.poisoned_forwards == (0 if load_async else 1)  # A's own, which was told of
    engine.assert_at_rest()
