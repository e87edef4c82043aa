"""Which shards together give the layers and heads a reader needs (SPEC §6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_format.geometry import Part


def covers(parts: Iterable[Part], need: Part) -> bool:
    """True where every layer and head of `need` is in one of `parts`."""
    return not _missing([need], parts)


def pick(parts: Sequence[Part], need: Part) -> list[tuple[int, Part]]:
    """Pieces that make up `need`, each with the number of the part to take it from; earlier parts are preferred.

    A part that covers everything is taken alone. The pieces do not overlap; together with what no part has they are
    `need`.
    """
    for number, part in enumerate(parts):
        if part.covers(need):
            return [(number, need)]
    pieces: list[tuple[int, Part]] = []
    open_areas = [need]
    for number, part in enumerate(parts):
        for area in open_areas:
            piece = area.intersect(part)
            if piece is not None:
                pieces.append((number, piece))
        open_areas = _missing(open_areas, [part])
    return pieces


def _missing(areas: list[Part], parts: Iterable[Part]) -> list[Part]:
    for part in parts:
        areas = [rest for area in areas for rest in _subtract(area, part)]
        if not areas:
            break
    return areas


def _subtract(area: Part, part: Part) -> list[Part]:
    """`area` without `part`, as at most four rectangles of layers × heads."""
    common = area.intersect(part)
    if common is None:
        return [area]
    rest = []
    if area.layer_start < common.layer_start:
        rest.append(Part(area.layer_start, common.layer_start, area.head_start, area.head_stop))
    if common.layer_stop < area.layer_stop:
        rest.append(Part(common.layer_stop, area.layer_stop, area.head_start, area.head_stop))
    if area.head_start is None or area.head_stop is None or common.head_start is None or common.head_stop is None:
        return rest
    if area.head_start < common.head_start:
        rest.append(Part(common.layer_start, common.layer_stop, area.head_start, common.head_start))
    if common.head_stop < area.head_stop:
        rest.append(Part(common.layer_start, common.layer_stop, common.head_stop, area.head_stop))
    return rest
