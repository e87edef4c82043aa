"""Shards (SPEC §8): one safetensors file holds one chunk × part × encoding, and says everything about itself.

The header is written and read here; data bytes are the caller's. Every header this module writes starts with the same
bytes, so a reader knows at once whether a file is a shard, and where its checksum stands.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .canonical_json import MAX_INTEGER, STRICT_DECODER, dump_canonical, load_strict
from .checksums import DIGEST_BYTES, Buffer, xxh3_hex
from .dtypes import NEWER_DTYPE, Dtype
from .errors import ChecksumMismatch, FormatError, GeometryError, ShardError, UnsupportedVersion
from .geometry import Part, TensorSpec, tensors_of
from .identity import MAX_CHUNK_TOKENS, Fingerprint
from .keys import ChunkKey, token_words

ALIGNMENT = 4096
MAX_HEADER_BYTES = 4 << 20
FORMAT = "1"
RAW = "raw"
CHECKSUM = "xxh3-128"
NONCE_BYTES = 8
ENCODING_OVERHEAD_BYTES = 32
"""What an encoded tensor may be longer than the raw one (encodings.md §1)."""
MAX_DEPTH = 0xFFFF_FFFF

_LENGTH = struct.Struct("<Q")
_START = b'{"__metadata__":{"lmcache.header_checksum":"'
_CHECKSUM_AT = _LENGTH.size + len(_START)
_BLANK = b"0" * 32
_HEX32 = re.compile(r"[0-9a-f]{32}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX16 = re.compile(r"[0-9a-f]{16}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_LEAST_ENTRY_BYTES = 40


@dataclass(frozen=True, slots=True)
class EncodingInfo:
    """How the tensors of a shard are stored.

    `quality` names the class of a lossy encoding and is None for a lossless one. A reader that does not know an
    encoding whose `must_understand` is true takes the shard for absent.
    """

    name: str = RAW
    parameters: Mapping[str, Any] = field(default_factory=dict)
    quality: str | None = None
    must_understand: bool = True

    @property
    def is_lossless(self) -> bool:
        """True where decoding gives back the very bytes that were encoded."""
        return self.quality is None

    @property
    def label(self) -> str:
        """How file names and manifests call this encoding: `bfx`, `uq-near`."""
        return self.name if self.quality is None else f"{self.name}-{self.quality}"

    def to_json(self) -> str:
        """Canonical JSON, as kept in `lmcache.encoding`."""
        fields = {
            "must_understand": self.must_understand,
            "name": self.name,
            "parameters": dict(self.parameters),
            "quality": self.quality,
        }
        return dump_canonical(fields, error=ShardError).decode("utf-8")

    @classmethod
    def from_json(cls, text: str) -> EncodingInfo:
        """Read `lmcache.encoding`; raises `ShardError`."""
        value = load_strict(text, error=ShardError)
        if not isinstance(value, dict) or not {"must_understand", "name", "parameters", "quality"} <= set(value):
            raise ShardError("encoding lacks fields", found=text[:120])
        name, parameters, quality = value["name"], value["parameters"], value["quality"]
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9]{1,16}", name):
            raise ShardError("encoding has no usable name", expected="1 to 16 of a-z, 0-9", found=repr(name)[:80])
        if not isinstance(parameters, dict) or not isinstance(value["must_understand"], bool):
            raise ShardError("encoding has a field of the wrong form", found=text[:120])
        if quality is not None and not (isinstance(quality, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,15}", quality)):
            raise ShardError("encoding has no usable quality class", found=repr(quality)[:80])
        if name == RAW and (quality is not None or parameters):
            raise ShardError("raw has neither a quality class nor parameters", found=text[:120])
        return cls(name, parameters, quality, value["must_understand"])


@dataclass(frozen=True, slots=True)
class ShardMeta:
    """What a shard says about itself. `depth` counts the chunks before this one; `created_ms` is Unix time.

    `nonce` (16 hex digits) tells this write from every other of the same name. `producer` names the engine that
    computed the KV; `provenance` the encoding and checksum this one was made from; both are for people. `tokens` is
    None unless the writer was told to keep the token ids.
    """

    fingerprint: Fingerprint
    key: ChunkKey
    parent: ChunkKey
    depth: int
    num_tokens: int
    chunk_tokens: int
    part: Part
    dtype: Dtype
    head_dim_k: int
    head_dim_v: int
    nonce: str
    created_ms: int
    writer: str = ""
    encoding: EncodingInfo = field(default_factory=EncodingInfo)
    producer: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None

    @property
    def is_tail(self) -> bool:
        """True for the short last chunk of a sequence."""
        return self.num_tokens < self.chunk_tokens

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The raw tensors, in data order."""
        return tensors_of(self.part, self.num_tokens, self.dtype, self.head_dim_k, self.head_dim_v)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's stored bytes lie: `begin` to `end`, counted from the start of the data."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A parsed header. `checksums` cover the stored bytes: one digest a slab where raw, one a tensor where encoded;
    `decoded_checksums` cover the slabs that a lossless encoding gives back, and are empty where raw or lossy.
    `tensor_checksums`, one digest a tensor, may stand beside the former where raw: for readers of whole shards."""

    meta: ShardMeta
    tensors: tuple[StoredTensor, ...]
    checksums: bytes
    decoded_checksums: bytes
    data_start: int
    file_bytes: int
    header_checksum: str
    tensor_checksums: bytes = b""

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.file_bytes - self.data_start


def build_header(
    meta: ShardMeta,
    checksums: bytes,
    stored_bytes: Sequence[int] | None = None,
    decoded_checksums: bytes = b"",
    tensor_checksums: bytes = b"",
) -> bytes:
    """The header of a shard, padded so that data starts at a multiple of 4096.

    `checksums` are 16-byte digests back to back; `stored_bytes`, the size of every encoded tensor, is None where raw.
    """
    _check_meta(meta)
    specs = meta.specs
    is_raw = meta.encoding.name == RAW
    if is_raw != (stored_bytes is None):
        raise ShardError("exactly encoded shards have stored sizes", found=meta.encoding.name)
    _check_digest_counts(specs, is_raw, meta.encoding.is_lossless, checksums, decoded_checksums or None)
    _check_tensor_digests(specs, is_raw, tensor_checksums or None)
    table = _raw_layout(meta).table if stored_bytes is None else _encoded_table(specs, stored_bytes)
    metadata = _metadata_text(meta, checksums, decoded_checksums, tensor_checksums)
    text = _START + _BLANK + b'"' + metadata + b"}" + table.encode() + b"}"
    padded = -(_LENGTH.size + len(text)) % ALIGNMENT + len(text)
    if padded + _LENGTH.size > MAX_HEADER_BYTES:
        raise ShardError("header is too long", expected=f"at most {MAX_HEADER_BYTES} bytes", found=padded)
    header = bytearray(_LENGTH.pack(padded) + text.ljust(padded, b" "))
    header[_CHECKSUM_AT : _CHECKSUM_AT + 32] = xxh3_hex(header).encode()
    return bytes(header)


def header_bytes(first: Buffer, file_bytes: int | None = None) -> int:
    """Bytes of the whole header, its length field included, from the first 8 bytes of a file.

    Raises `ShardError` where the file cannot be a shard.
    """
    if len(first) < _LENGTH.size:
        raise ShardError("file is too short for a header", expected="at least 8 bytes", found=len(first))
    size = int(_LENGTH.unpack_from(first)[0]) + _LENGTH.size
    if size > MAX_HEADER_BYTES or size % ALIGNMENT:
        raise ShardError(
            "header length is out of range",
            expected=f"a multiple of {ALIGNMENT}, at most {MAX_HEADER_BYTES}",
            found=size,
        )
    if file_bytes is not None and size > file_bytes:
        raise ShardError("file ends within its header", expected=f"{size} bytes", found=file_bytes)
    return size


def looks_like_shard(first: Buffer) -> bool:
    """True where the first bytes of a file (64 are enough) are those of a shard of this format, sound or not."""
    return bytes(first[_LENGTH.size : _CHECKSUM_AT]) == _START


def parse_header(header: Buffer, file_bytes: int | None = None) -> ShardHeader:
    """Read and check a whole header (as many bytes as `header_bytes` says).

    `file_bytes`, where known, must be exactly what the header asks for. Raises `ShardError` or `ChecksumMismatch` for
    damage, `UnsupportedVersion` for a newer format or checksum.
    """
    size = header_bytes(header, file_bytes)
    if len(header) != size:
        raise ShardError("header has another length", expected=size, found=len(header))
    if not looks_like_shard(header):
        raise ShardError("file does not begin as a shard does")
    claimed = _verify_header_checksum(header)
    text, table_at, metadata = _split_header(header)
    if metadata.get("lmcache.format") != FORMAT:
        raise UnsupportedVersion(
            "shard is of another format", expected=FORMAT, found=repr(metadata.get("lmcache.format"))[:80]
        )
    meta = _parse_meta(metadata)
    if meta.part.num_layers * _LEAST_ENTRY_BYTES > len(text):  # before memory is spent on what cannot be there
        raise ShardError("header has not all layers of its part", expected=str(meta.part), found=f"{len(text)} bytes")
    try:
        specs = meta.specs
    except GeometryError as problem:
        raise ShardError("shard has no possible shape", found=problem) from None
    is_raw = meta.encoding.name == RAW
    checksums = _digests(metadata, "lmcache.checksums")
    decoded = _digests_if_there(metadata, "lmcache.decoded_checksums")
    _check_digest_counts(specs, is_raw, meta.encoding.is_lossless, checksums, decoded)
    of_tensors = _digests_if_there(metadata, "lmcache.tensor_checksums")
    _check_tensor_digests(specs, is_raw, of_tensors)
    tensors = _parse_raw_table(meta, text[table_at:]) if is_raw else _parse_encoded_table(specs, text[table_at:])
    expected = size + tensors[-1].end
    if file_bytes is not None and file_bytes != expected:
        raise ShardError("file has another length than its header says", expected=expected, found=file_bytes)
    return ShardHeader(meta, tensors, checksums, decoded or b"", size, expected, claimed, of_tensors or b"")


def _verify_header_checksum(header: Buffer) -> str:
    blanked = bytearray(header)
    claimed = bytes(blanked[_CHECKSUM_AT : _CHECKSUM_AT + 32])
    blanked[_CHECKSUM_AT : _CHECKSUM_AT + 32] = _BLANK
    found = xxh3_hex(blanked)
    if claimed != found.encode():
        raise ChecksumMismatch("header checksum", expected=claimed.decode("ascii", "replace"), found=found)
    return found


def _split_header(header: Buffer) -> tuple[str, int, dict[str, str]]:
    """The header text without padding, where its tensor table starts, and its metadata."""
    try:
        text = bytes(header[_LENGTH.size :]).rstrip(b" ").decode("utf-8")
        metadata, table_at = STRICT_DECODER.raw_decode(text, len('{"__metadata__":'))
    except (ValueError, RecursionError) as problem:
        raise ShardError("header is not valid JSON", found=problem) from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardError("metadata is not an object of strings")
    if "\\u" in text and not all(map(_is_unicode, (*metadata, *metadata.values()))):
        raise ShardError("metadata holds half a surrogate pair")  # stock safetensors does not open such a file
    return text, table_at, metadata


def _metadata_text(meta: ShardMeta, checksums: bytes, decoded_checksums: bytes, tensor_checksums: bytes) -> bytes:
    """The members of `__metadata__` after the header checksum, each with its leading comma."""
    fields = {
        "format": FORMAT,
        "fingerprint": meta.fingerprint,
        "key": meta.key.hex(),
        "parent": meta.parent.hex(),
        "depth": str(meta.depth),
        "num_tokens": str(meta.num_tokens),
        "chunk_tokens": str(meta.chunk_tokens),
        "part": str(meta.part),
        "dtype": meta.dtype.value,
        "head_dims": f"{meta.head_dim_k},{meta.head_dim_v}",
        "encoding": meta.encoding.to_json(),
        "checksums": f"{CHECKSUM}:{base64.b64encode(checksums).decode()}",
    }
    if tensor_checksums:
        fields["tensor_checksums"] = f"{CHECKSUM}:{base64.b64encode(tensor_checksums).decode()}"
    fields |= {"nonce": meta.nonce, "writer": meta.writer, "created": str(meta.created_ms)}
    if decoded_checksums:
        fields["decoded_checksums"] = f"{CHECKSUM}:{base64.b64encode(decoded_checksums).decode()}"
    for name, value in (("producer", meta.producer), ("provenance", meta.provenance)):
        if value:
            fields[name] = dump_canonical(dict(value), error=ShardError).decode("utf-8")
    if meta.tokens is not None:
        fields["tokens"] = base64.b64encode(token_words(meta.tokens).tobytes()).decode()
    return "".join(f',"lmcache.{name}":{json.dumps(value)}' for name, value in fields.items()).encode()


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_meta(meta: ShardMeta) -> None:
    """Raise `ShardError` for what `parse_header` would refuse: better now than in every later reader."""
    lengths_are_right = len(meta.key) == len(meta.parent) == 32
    if not (lengths_are_right and _HEX32.fullmatch(meta.fingerprint) and _HEX16.fullmatch(meta.nonce)):
        raise ShardError("fingerprint, key, parent or nonce has another form", found=(meta.fingerprint, meta.nonce))
    if not 1 <= meta.num_tokens <= meta.chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ShardError("token count is out of range", found=(meta.num_tokens, meta.chunk_tokens))
    if not 0 <= meta.depth <= MAX_DEPTH or not 0 <= meta.created_ms <= MAX_INTEGER:
        raise ShardError("depth or time is out of range", found=(meta.depth, meta.created_ms))
    if meta.tokens is not None and len(meta.tokens) != meta.num_tokens:
        raise ShardError("tokens are not as many as num_tokens", expected=meta.num_tokens, found=len(meta.tokens))
    if not _is_unicode(meta.writer):
        raise ShardError("writer is not Unicode text", found=ascii(meta.writer))
    EncodingInfo.from_json(meta.encoding.to_json())


def _parse_meta(metadata: dict[str, str]) -> ShardMeta:
    def text(name: str, pattern: re.Pattern[str]) -> str:
        value = metadata.get(f"lmcache.{name}", "")
        if not pattern.fullmatch(value):
            raise ShardError(f"{name} has the wrong form", expected=pattern.pattern, found=repr(value[:80]))
        return value

    def number(name: str, least: int, most: int) -> int:
        value = int(text(name, _DECIMAL))
        if not least <= value <= most:
            raise ShardError(f"{name} is out of range", expected=f"{least} to {most}", found=value)
        return value

    def optional_object(name: str) -> dict[str, Any]:
        if f"lmcache.{name}" not in metadata:
            return {}
        value = load_strict(metadata[f"lmcache.{name}"], error=ShardError)
        if not isinstance(value, dict):
            raise ShardError(f"{name} is not a JSON object")
        return value

    chunk_tokens = number("chunk_tokens", 1, MAX_CHUNK_TOKENS)
    num_tokens = number("num_tokens", 1, chunk_tokens)
    dims = text("head_dims", re.compile(r"[1-9][0-9]{0,6},(?:0|[1-9][0-9]{0,6})")).split(",")
    try:
        part = Part.parse(metadata.get("lmcache.part", ""))
        dtype = Dtype(metadata.get("lmcache.dtype", ""))
    except FormatError as problem:
        raise ShardError("part has the wrong form", found=problem) from None
    except ValueError:
        found = metadata.get("lmcache.dtype", "")
        error = UnsupportedVersion if NEWER_DTYPE.fullmatch(found) else ShardError
        raise error("dtype is unknown", expected=[d.value for d in Dtype], found=repr(found)[:80]) from None
    return ShardMeta(
        fingerprint=Fingerprint(text("fingerprint", _HEX32)),
        key=ChunkKey(bytes.fromhex(text("key", _HEX64))),
        parent=ChunkKey(bytes.fromhex(text("parent", _HEX64))),
        depth=number("depth", 0, MAX_DEPTH),
        num_tokens=num_tokens,
        chunk_tokens=chunk_tokens,
        part=part,
        dtype=dtype,
        head_dim_k=int(dims[0]),
        head_dim_v=int(dims[1]),
        nonce=text("nonce", _HEX16),
        created_ms=number("created", 0, MAX_INTEGER),
        writer=metadata.get("lmcache.writer", ""),
        encoding=EncodingInfo.from_json(metadata.get("lmcache.encoding", "")),
        producer=optional_object("producer"),
        provenance=optional_object("provenance"),
        tokens=_parse_tokens(metadata.get("lmcache.tokens"), num_tokens),
    )


def _parse_tokens(text: str | None, num_tokens: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    raw = _base64(text, "tokens")
    if len(raw) != 4 * num_tokens:
        raise ShardError("tokens are not as many as num_tokens", expected=num_tokens, found=len(raw) / 4)
    return struct.unpack(f"<{num_tokens}I", raw)


def _digests(metadata: dict[str, str], name: str) -> bytes:
    algorithm, _, text = metadata.get(name, "").partition(":")
    if algorithm != CHECKSUM:
        raise UnsupportedVersion(f"{name} uses another algorithm", expected=CHECKSUM, found=repr(algorithm)[:80])
    return _base64(text, name)


def _digests_if_there(metadata: dict[str, str], name: str) -> bytes | None:
    """None where the member is missing; one that holds no digests is another thing (SPEC §8.3)."""
    return _digests(metadata, name) if name in metadata else None


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ShardError(f"{name} is not base64", found=repr(text[:40])) from None


def _check_digest_counts(
    specs: Sequence[TensorSpec], is_raw: bool, is_lossless: bool, checksums: bytes, decoded: bytes | None
) -> None:
    slabs = len(specs) * specs[0].num_slabs  # every tensor of a part has as many heads
    stored = slabs if is_raw else len(specs)
    if len(checksums) != stored * DIGEST_BYTES:
        raise ShardError(
            "checksums are not one for each stored piece", expected=stored, found=len(checksums) / DIGEST_BYTES
        )
    decoded_count = slabs if is_lossless and not is_raw else None
    found = None if decoded is None else len(decoded) / DIGEST_BYTES
    if found != decoded_count:
        raise ShardError(
            "decoded checksums are one for each slab where lossless and not raw, and nowhere else",
            expected="none" if decoded_count is None else decoded_count,
            found="none" if found is None else found,
        )


def _check_tensor_digests(specs: Sequence[TensorSpec], is_raw: bool, checksums: bytes | None) -> None:
    if checksums is not None and (not is_raw or len(checksums) != len(specs) * DIGEST_BYTES):
        expected = f"{len(specs)}, in raw shards only"
        raise ShardError(
            "tensor checksums are not one a tensor", expected=expected, found=len(checksums) / DIGEST_BYTES
        )


@dataclass(frozen=True, slots=True)
class _RawLayout:
    tensors: tuple[StoredTensor, ...]
    table: str


def _raw_layout(meta: ShardMeta) -> _RawLayout:
    return _raw_layout_of(meta.part, meta.num_tokens, meta.dtype, meta.head_dim_k, meta.head_dim_v)


@lru_cache(maxsize=64)
def _raw_layout_of(part: Part, num_tokens: int, dtype: Dtype, dim_k: int, dim_v: int) -> _RawLayout:
    tensors, position = [], 0
    for spec in tensors_of(part, num_tokens, dtype, dim_k, dim_v):
        tensors.append(StoredTensor(spec, position, position + spec.nbytes))
        position += spec.nbytes
    table = "".join(
        f',"{t.spec.name}":{{"dtype":"{t.spec.dtype.value}","shape":[{",".join(map(str, t.spec.shape))}]'
        f',"data_offsets":[{t.begin},{t.end}]}}'
        for t in tensors
    )
    return _RawLayout(tuple(tensors), table)


def _encoded_table(specs: Sequence[TensorSpec], stored_bytes: Sequence[int]) -> str:
    if len(stored_bytes) != len(specs) or min(stored_bytes) < 1:
        raise ShardError("every encoded tensor has at least one byte", expected=len(specs), found=list(stored_bytes))
    entries, position = [], 0
    for spec, size in zip(specs, stored_bytes, strict=True):
        if size > spec.nbytes + ENCODING_OVERHEAD_BYTES:
            raise ShardError(
                f"tensor {spec.name} is stored in more bytes than any encoding needs",
                expected=f"at most {spec.nbytes + ENCODING_OVERHEAD_BYTES}",
                found=size,
            )
        offsets = f"[{position},{position + size}]"
        entries.append(f',"{spec.name}":{{"dtype":"U8","shape":[{size}],"data_offsets":{offsets}}}')
        position += size
    return "".join(entries)


def _parse_raw_table(meta: ShardMeta, table: str) -> tuple[StoredTensor, ...]:
    """A raw table follows from the part, so it is compared, not parsed."""
    layout = _raw_layout(meta)
    if table != layout.table + "}":
        raise ShardError("tensor table is not that of the part", expected=layout.table[:80], found=table[:80])
    return layout.tensors


def _parse_encoded_table(specs: tuple[TensorSpec, ...], table: str) -> tuple[StoredTensor, ...]:
    entries = load_strict("{" + table.removeprefix(","), error=ShardError)
    if not isinstance(entries, dict) or list(entries) != [spec.name for spec in specs]:
        raise ShardError("tensors are not those of the part", expected=f"{len(specs)} from {specs[0].name} on")
    tensors, position = [], 0
    for spec in specs:
        entry = entries[spec.name]
        try:
            (begin, end), (length,), dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
        except (KeyError, TypeError, ValueError):
            raise ShardError(f"tensor {spec.name} has an entry of the wrong form") from None
        if not all(type(number) is int for number in (begin, end, length)) or dtype != "U8":
            raise ShardError(f"tensor {spec.name} has an entry of the wrong form", found=str(entry)[:120])
        if begin != position or end - begin != length or length < 1:
            raise ShardError(
                f"tensor {spec.name} leaves a hole or overlaps", expected=f"begin {position}", found=(begin, end)
            )
        tensors.append(StoredTensor(spec, begin, end))
        position = end
    if table != _encoded_table(specs, [tensor.end - tensor.begin for tensor in tensors]) + "}":
        raise ShardError("tensor table is not in canonical form")
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class HeaderLikeness:
    """What the headers of one writer's raw shards have in common, so that the next one is compared and not parsed.

    Made from a header that was parsed. All that may differ is key, parent, depth, checksums, nonce and time; of these
    the first three are given, and the rest is taken from where it must stand. Anything else is for `parse_header`.
    """

    before_key: bytes
    before_parent: bytes
    before_depth: bytes
    before_checksums: bytes
    checksum_characters: int
    before_tensor_checksums: bytes
    tensor_checksum_characters: int
    before_nonce: bytes
    before_created: bytes
    end: bytes

    @classmethod
    def of(cls, header: Buffer, parsed: ShardHeader) -> HeaderLikeness | None:
        """None for a header that is not of the common kind: encoded, without checksums of whole tensors, in another
        order, or with members that change from shard to shard."""
        meta = parsed.meta
        if not parsed.tensor_checksums or meta.tokens is not None or meta.provenance:
            return None
        checksums, tensor_checksums = (base64.b64encode(one) for one in (parsed.checksums, parsed.tensor_checksums))
        rest = bytes(header[_CHECKSUM_AT + 32 :]).rstrip(b" ")
        pieces = []
        for marker, value in (
            (b'"lmcache.key":"', meta.key.hex().encode()),
            (b'"lmcache.parent":"', meta.parent.hex().encode()),
            (b'"lmcache.depth":"', b"%d" % meta.depth),
            (b'"lmcache.checksums":"xxh3-128:', checksums),
            (b'"lmcache.tensor_checksums":"xxh3-128:', tensor_checksums),
            (b'"lmcache.nonce":"', meta.nonce.encode()),
            (b'"lmcache.created":"', b"%d" % meta.created_ms),
        ):
            before, found, after = rest.partition(marker)
            if not found or not after.startswith(value + b'"'):
                return None
            pieces.append(before + marker)
            rest = after[len(value) :]
        key, parent, depth, slab, tensor, nonce, created = pieces
        return cls(key, parent, depth, slab, len(checksums), tensor, len(tensor_checksums), nonce, created, rest)

    def tensor_checksums_of(self, header: Buffer, key: bytes, parent: bytes, depth: int) -> bytes | None:
        """The tensors' checksums of a raw shard whose header is alike in everything, its own checksum being right.

        None where it is not, for whatever reason: parse it to learn which.
        """
        whole = bytes(header)
        start = self.before_key + key.hex().encode() + self.before_parent + parent.hex().encode()
        start += self.before_depth + b"%d" % depth + self.before_checksums
        at = _CHECKSUM_AT + 32 + len(start)
        tensor_mark = at + self.checksum_characters
        tensor_at = tensor_mark + len(self.before_tensor_checksums)
        tensor_end = tensor_at + self.tensor_checksum_characters
        nonce_at = tensor_end + len(self.before_nonce)
        nonce_end = nonce_at + 2 * NONCE_BYTES
        created_at = nonce_end + len(self.before_created)
        created_end = whole.find(b'"', created_at)
        is_alike = (
            whole.startswith(_START, _LENGTH.size)
            and whole.startswith(start, _CHECKSUM_AT + 32)
            and whole.startswith(self.before_tensor_checksums, tensor_mark)
            and whole.startswith(self.before_nonce, tensor_end)
            and _HEX16.fullmatch(whole[nonce_at:nonce_end].decode("latin-1")) is not None
            and whole.startswith(self.before_created, nonce_end)
            and _DECIMAL.fullmatch(whole[created_at:created_end].decode("latin-1")) is not None
            and whole.startswith(self.end, created_end)
            and whole.count(b" ", created_end + len(self.end)) == len(whole) - created_end - len(self.end)
        )
        if not is_alike:
            return None
        try:
            _verify_header_checksum(whole)
            return binascii.a2b_base64(whole[tensor_at:tensor_end], strict_mode=True)
        except (ChecksumMismatch, binascii.Error):
            return None
