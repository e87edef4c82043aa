"""Shards (SPEC §8): header, tensor table, digests, tensors."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from . import encodings, names, strict_json
from .checksums import xxh3_128
from .identity import ITEM_BYTES, LATER_DTYPE, MAX_CHUNK_TOKENS, Identity
from .metadata import Metadata
from .names import Part, ShardName
from .refusals import Reason, Refused, damaged, later

BLOCK = 4096
MAX_HEADER = 4 << 20
MAX_LAYERS = MAX_HEADS = 4096
START = b'{"__metadata__":{"lmcache.header_checksum":"'
DIGITS = 32
SLACK = 32
"""Bytes by which an encoded tensor may be longer than the raw one."""

_NAME = re.compile(r"[a-z0-9]{1,16}")
_QUALITY = re.compile(r"[a-z0-9][a-z0-9-]{0,15}")
_ENCODED = re.compile(r'"dtype":"U8","shape":\[([0-9]{1,19})\],"data_offsets":\[([0-9]{1,19}),([0-9]{1,19})\]\}')


@dataclass(frozen=True)
class Tensor:
    """One raw tensor: its bytes are `begin` … `end`−1 of the data as stored."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def slabs(self) -> int:
        """Heads, one for a latent."""
        return self.shape[0] if len(self.shape) == 3 else 1


@dataclass(frozen=True)
class Header:
    """What a sound header says."""

    data_start: int
    fingerprint: str
    key: bytes
    parent: bytes
    depth: int
    num_tokens: int
    chunk_tokens: int
    part: Part
    dtype: str
    head_dims: tuple[int, int]
    encoding: str
    quality: str | None
    parameters: dict[str, Any]
    nonce: str
    created: int
    tensors: list[Tensor]
    digests: list[bytes]
    decoded_digests: list[bytes] | None
    tensor_digests: list[bytes] | None
    """Of whole tensors, beside those of slabs; None where they are not told."""

    @property
    def label(self) -> str:
        """Label of the encoding, as in the path."""
        return self.encoding if self.quality is None else f"{self.encoding}-{self.quality}"


def _must(holds: object, text: str, step: int) -> None:
    if not holds:
        raise damaged(text, step)


def raw_tensors(part: Part, tokens: int, head_dims: tuple[int, int], item: int) -> list[Tensor]:
    """The raw tensors of a part, in data order."""
    tensors: list[Tensor] = []
    for layer in range(*part.layers):
        if part.heads is None:
            named = [("latent", (tokens, head_dims[0]))]
        else:
            heads = part.heads[1] - part.heads[0]
            named = [(side, (heads, tokens, dim)) for side, dim in zip("kv", head_dims, strict=True)]
        for side, shape in named:
            begin = tensors[-1].end if tensors else 0
            tensors.append(Tensor(f"layers.{layer}.{side}", shape, begin, begin + prod(shape) * item))
    return tensors


def _raw_table(tensors: list[Tensor], dtype: str) -> str:
    rows = []
    for tensor in tensors:
        shape = ",".join(map(str, tensor.shape))
        place = f'"shape":[{shape}],"data_offsets":[{tensor.begin},{tensor.end}]'
        rows.append(f',"{tensor.name}":{{"dtype":"{dtype}",{place}}}')
    return "".join(rows) + "}"


def _encoded_table(text: str, raw: list[Tensor]) -> list[Tensor]:
    """The tensors of a table that stores these as U8, each read where the one before ends."""
    tensors, at, begin = [], 0, 0
    for tensor in raw:
        start = f',"{tensor.name}":{{'
        match = _ENCODED.match(text, at + len(start)) if text.startswith(start, at) else None
        _must(match, "tensor table", 6)
        assert match is not None
        size, *offsets = map(int, match.groups())
        _must(match.group() == _plain(size, offsets), "numbers of the tensor table", 6)
        _must(offsets == [begin, begin + size], "offsets of the tensor table", 6)
        _must(1 <= size <= tensor.end - tensor.begin + SLACK, "bytes of an encoded tensor", 6)
        tensors.append(Tensor(tensor.name, tensor.shape, begin, begin + size))
        at, begin = match.end(), begin + size
    _must(text[at:] == "}", "end of the tensor table", 6)
    return tensors


def _plain(size: int, offsets: list[int]) -> str:
    return f'"dtype":"U8","shape":[{size}],"data_offsets":[{offsets[0]},{offsets[1]}]}}'


def _json(data: bytes) -> tuple[dict[str, Any], str]:
    """The metadata, and the text from behind it to the end of the JSON."""
    try:
        text = strict_json.text_of(data).rstrip(" ")
        members, end = strict_json.DECODER.raw_decode(text, len('{"__metadata__":'))
    except (ValueError, Refused) as error:
        raise damaged(f"JSON of a header: {error}", 5) from error
    for name, value in members.items():
        _must(isinstance(value, str) and strict_json.scalar(value) and strict_json.scalar(name), "metadata", 5)
    return members, text[end:]


def parse_header(data: bytes, size: int) -> Header:
    """Checks (1) to (6) of SPEC §8.5 on the first bytes of a file of `size` bytes (all of them, or enough)."""
    _must(len(data) >= 8, "no length", 1)
    data_start = 8 + struct.unpack_from("<Q", data)[0]
    _must(data_start % BLOCK == 0 and 0 < data_start <= min(MAX_HEADER, size, len(data)), "length of a header", 1)
    header = data[:data_start]
    digits = 8 + len(START)
    if not header.startswith(START, 8):
        raise Refused(Reason.NOT_OURS, "another safetensors file", 2)
    zeroed = header[:digits] + b"0" * DIGITS + header[digits + DIGITS :]
    if xxh3_128(zeroed).hex().encode() != header[digits : digits + DIGITS]:
        raise damaged("checksum of a header", 3, checksum=True)
    members, table = _json(header[8:])
    metadata = Metadata(members)
    if members.get("lmcache.format") != "1":
        raise later("format of a shard", 4)
    return _header(metadata, table, data_start, size)


def _encoding(metadata: Metadata) -> tuple[str, str | None, dict[str, Any]]:
    value = metadata.json_object("encoding")
    _must(set(value) >= {"must_understand", "name", "parameters", "quality"}, "members of encoding", 5)
    name, quality, parameters = value["name"], value["quality"], value["parameters"]
    _must(isinstance(name, str) and _NAME.fullmatch(name), "name of encoding", 5)
    _must(quality is None or (isinstance(quality, str) and _QUALITY.fullmatch(quality)), "quality of encoding", 5)
    _must(isinstance(value["must_understand"], bool) and isinstance(parameters, dict), "forms of encoding", 5)
    _must(name != "raw" or (quality is None and not parameters), "raw with parameters or quality", 5)
    return name, quality, parameters


def _header(metadata: Metadata, table: str, data_start: int, size: int) -> Header:
    """Checks (5) and (6)."""
    chunk_tokens = metadata.number("chunk_tokens", 1, MAX_CHUNK_TOKENS)
    num_tokens = metadata.number("num_tokens", 1, chunk_tokens)
    try:
        part = names.part(metadata.text("part"))
    except Refused as error:
        raise damaged(str(error), 5) from error
    heads = part.heads or (0, 1)
    _must(part.layers[1] - part.layers[0] <= MAX_LAYERS and heads[1] - heads[0] <= MAX_HEADS, "size of the part", 5)
    head_dims = metadata.head_dims()
    _must(head_dims[0] >= 1 and (head_dims[1] == 0) == (part.heads is None), "head_dims", 5)
    encoding, quality, parameters = _encoding(metadata)
    digests = metadata.digests("checksums")
    lossless = quality is None and encoding != "raw"
    _must(("decoded_checksums" in metadata) == lossless, "decoded checksums", 5)
    decoded = metadata.digests("decoded_checksums") if lossless else None
    of_tensors = metadata.digests("tensor_checksums") if "tensor_checksums" in metadata else None
    _must(of_tensors is None or encoding == "raw", "checksums of whole tensors", 5)
    for name in ("producer", "provenance"):
        if name in metadata:
            metadata.json_object(name)
    if "tokens" in metadata:
        tokens = metadata.base64("tokens", metadata.text("tokens"), 4)
        _must(len(tokens) == 4 * num_tokens, "number of tokens", 5)
    dtype = metadata.text("dtype")
    fixed = {
        "data_start": data_start,
        "fingerprint": metadata.hex("fingerprint", 16).hex(),
        "key": metadata.hex("key", 32),
        "parent": metadata.hex("parent", 32),
        "depth": metadata.number("depth", 0, (1 << 32) - 1),
        "nonce": metadata.hex("nonce", 8).hex(),
        "created": metadata.number("created", 0, 1 << 53),
    }
    if dtype not in ITEM_BYTES:
        _must(LATER_DTYPE.fullmatch(dtype), "form of dtype", 5)
        raise later(f"dtype {dtype[:20]!a}", 5)

    tensors = raw_tensors(part, num_tokens, head_dims, ITEM_BYTES[dtype])
    slabs = sum(tensor.slabs for tensor in tensors)
    if encoding == "raw":
        _must(table == _raw_table(tensors, dtype), "tensor table", 6)
    else:
        tensors = _encoded_table(table, tensors)
    _must(len(digests) == (slabs if encoding == "raw" else len(tensors)), "number of digests", 6)
    _must(decoded is None or len(decoded) == slabs, "number of decoded digests", 6)
    _must(of_tensors is None or len(of_tensors) == len(tensors), "number of digests of whole tensors", 6)
    _must(size == data_start + tensors[-1].end, "bytes of the file", 6)
    return Header(
        num_tokens=num_tokens, chunk_tokens=chunk_tokens, part=part, dtype=dtype, head_dims=head_dims,
        encoding=encoding, quality=quality, parameters=parameters, tensors=tensors, digests=digests,
        decoded_digests=decoded, tensor_digests=of_tensors, **fixed,
    )  # fmt: skip


def check_place(header: Header, name: ShardName, identity: Identity) -> None:
    """Checks (7) and (8): the path, and the namespace."""
    said = ShardName(header.fingerprint, header.key.hex(), header.part, header.label)
    if said != name:
        raise Refused(Reason.WRONG_PLACE, "the path says something else", 7)
    whole = identity.whole
    fits = header.part.layers[1] <= whole.layers[1] and (header.part.heads is None) == (whole.heads is None)
    if header.part.heads is not None and whole.heads is not None:
        fits = fits and header.part.heads[1] <= whole.heads[1]
    same = (identity.dtype, identity.chunk_tokens, (identity.head_dim_k, identity.head_dim_v))
    if not fits or same != (header.dtype, header.chunk_tokens, header.head_dims):
        raise Refused(Reason.WRONG_PLACE, "the namespace says something else", 8)


def check_asked(header: Header, key: bytes, parent: bytes, depth: int, num_tokens: int) -> None:
    """Check (9): that this is the chunk that was asked for."""
    if (header.key, header.parent, header.depth, header.num_tokens) != (key, parent, depth, num_tokens):
        raise Refused(Reason.WRONG_PLACE, "another chunk", 9)


def read_tensors(header: Header, read: Callable[[int, int], bytes]) -> dict[str, bytes]:
    """Checks (10) to (12): the raw bytes of all tensors; `read(begin, end)` reads the file."""
    decode = encodings.find(header.encoding, header.quality, header.parameters)
    raw = raw_tensors(header.part, header.num_tokens, header.head_dims, ITEM_BYTES[header.dtype])
    stored_digests, decoded_digests = iter(header.digests), iter(header.decoded_digests or [])
    whole_digests = iter(header.tensor_digests or [])
    tensors = {}
    for tensor, plain in zip(header.tensors, raw, strict=True):
        stored = read(header.data_start + tensor.begin, header.data_start + tensor.end)
        pieces = tensor.slabs if header.encoding == "raw" else 1
        _check_slabs(stored, pieces, stored_digests, 11)
        if header.tensor_digests is not None:
            _check_slabs(stored, 1, whole_digests, 11)
        content = decode(stored, tensor.name.rpartition(".")[2], tensor.shape, header.dtype)
        _must(len(content) == plain.end - plain.begin, "bytes of a decoded tensor", 12)
        if header.decoded_digests is not None:
            _check_slabs(content, tensor.slabs, decoded_digests, 12)
        tensors[tensor.name] = content
    return tensors


def _check_slabs(content: bytes, slabs: int, digests: Any, step: int) -> None:
    size = len(content) // slabs
    for at in range(slabs):
        if xxh3_128(content[at * size : (at + 1) * size]) != next(digests):
            raise damaged("checksum of a slab", step, checksum=True)
