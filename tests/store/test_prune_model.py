"""Put, mark, sweep, compact, touch, crash, read by two writers and two pruners, in every order: the model checker.

Exhaustive to a small depth (states that agree in all that decides what can happen next are entered once), random
beyond it. Whole worlds are copied, so that a step costs a millisecond.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tests.store.prune_world import STEP_MS, Crash, World, new_world

Action = Callable[[World], None]


def crash_now(world: World) -> None:
    raise Crash


SIMPLE: dict[str, Action] = {
    "fresh writer puts first": lambda world: world.put(0, 0, is_fresh=True),
    "fresh writer puts second": lambda world: world.put(0, 1, is_fresh=True),
    "stale writer puts first": lambda world: world.put(1, 0, is_fresh=False),
    "stale writer puts second": lambda world: world.put(1, 1, is_fresh=False),
    "fresh writer flushes": lambda world: world.flush(0),
    "stale writer flushes": lambda world: world.flush(1),
    "stale writer crashes": lambda world: world.crash(1),
    "stale writer reads": lambda world: world.read(1),
    "compact": World.compact,
    "grace passes": World.wait,
    "plan all": lambda world: world.plan(0),
    "plan limit": lambda world: world.plan(1),
    "mark all": lambda world: world.mark(0),
    "mark limit": lambda world: world.mark(1),
    "sweep": World.sweep,
}


def within(name: str, operation: str, where: str, other: Action) -> Action:
    return lambda world: world.during(SIMPLE[name], operation, where, other)


def marked_and_written_again(world: World) -> None:
    """All that another pruner and a writer can do between two looks."""
    world.now_ms -= STEP_MS  # in the same millisecond as far as clocks tell
    world.plan(1)
    world.mark(1)
    for chunk in (0, 1):
        world.put(0, chunk, is_fresh=True)


RACES: dict[str, Action] = {
    "mark all, dies before it is published": within("mark all", "put", ".lmi", crash_now),
    "mark all, a put between choice and mark": within("mark all", "put", ".lmi", SIMPLE["fresh writer puts second"]),
    "mark all, the other marks in between": within("mark all", "put", ".lmi", SIMPLE["mark limit"]),
    "mark all, marked and written again before it looks": within("mark all", "list", "/c", marked_and_written_again),
    "sweep, a put before it looks": within("sweep", "list", "/c", SIMPLE["fresh writer puts first"]),
    "sweep, dies between deletion and record": within("sweep", "put", ".lmi", crash_now),
    "sweep, dies before the deletion": within("sweep", "delete", ".safetensors", crash_now),
    "sweep, a put between look and deletion": within("sweep", "delete", ".", SIMPLE["fresh writer puts first"]),
    "sweep, another sweep between look and deletion": within("sweep", "delete", ".", SIMPLE["sweep"]),
    "sweep, compaction before the record": within("sweep", "put", ".lmi", SIMPLE["compact"]),
}
ACTIONS = {**SIMPLE, **RACES}


def explore(world: World, depth: int, actions: dict[str, Action]) -> int:
    """Every order of `depth` actions; returns how many different states there were."""
    seen: dict[object, int] = {world.signature(): 0}
    frontier = [((), world.save())]
    for level in range(1, depth + 1):
        following = []
        for path, saved in frontier:
            for name, action in actions.items():
                world.restore(saved)
                step(world, action, (*path, name))
                signature = world.signature()
                if signature in seen:
                    continue
                seen[signature] = level
                here = world.save()
                judged(world, (*path, name))
                following.append(((*path, name), here))
        frontier = following
    return len(seen)


def step(world: World, action: Action, path: Sequence[str]) -> None:
    world.now_ms += STEP_MS
    try:
        action(world)
        world.check()
    except AssertionError as problem:
        raise AssertionError(f"{problem}\nafter: {'; '.join(path)}") from problem


def judged(world: World, path: Sequence[str]) -> None:
    try:
        world.settle()
    except AssertionError as problem:
        raise AssertionError(f"{problem}\nsettling after: {'; '.join(path)}") from problem


def test_every_order_of_three_actions():
    with new_world() as world:
        assert explore(world, 3, ACTIONS) > 100


@pytest.mark.slow
def test_every_order_of_actions_from_two_written_chunks():
    """From where the interesting part begins: both chunks written, flushed, and read by the stale writer."""
    with new_world() as world:
        for name in ("stale writer puts first", "stale writer puts second", "stale writer flushes", "plan all"):
            step(world, ACTIONS[name], [name])
        assert explore(world, 5, ACTIONS) > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_long_random_orders(seed: int):
    chosen = random.Random(seed)
    names = list(ACTIONS)
    with new_world() as world:
        start = world.save()
        for _ in range(40):
            world.restore(start)
            path: list[str] = []
            for _ in range(40):
                path.append(chosen.choice(names))
                step(world, ACTIONS[path[-1]], path)
            judged(world, path)
