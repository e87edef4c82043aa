"""Whose KV it is: by content, whatever the name, the path and the clock say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.integration.errors import (
    AdapterError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    UnverifiedWeights,
)
from lmcache_cli.integration.transformers import weights_digest as digests
from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_format.dtypes import Dtype
from lmcache_format.identity import AttentionKind, Identity, LayerGroup
from tests.integration.transformers.conftest import MakeDirectory


def identity_of(directory: Path, **options: Any) -> Identity:
    return identify(directory, **options).identity


@pytest.mark.slow
def test_identity_describes_the_cache(make_directory: MakeDirectory) -> None:
    identity = identity_of(make_directory("a"))
    assert identity.model == "example/tiny"
    assert identity.weights.startswith("sha256:")
    assert (identity.layers, identity.kv_heads, identity.head_dim_k, identity.head_dim_v) == (3, 2, 8, 8)
    assert identity.dtype is Dtype.F32
    assert identity.groups == (LayerGroup(AttentionKind.FULL, 0, 3),)
    assert identity.rope == {"rope_type": "default", "rope_theta": "10000.0"}
    assert identity.is_verified
    assert Identity.from_json(identity.canonical_json()) == identity


def test_c03_one_other_byte_in_the_weights_is_another_identity(make_directory: MakeDirectory) -> None:
    a = identity_of(make_directory("a", weights=b"weights 0"), name="demo")
    b = identity_of(make_directory("b", weights=b"weights 1"), name="demo")
    assert a.model == b.model == "demo"
    assert a.fingerprint != b.fingerprint


def test_c03_path_and_times_change_nothing(make_directory: MakeDirectory, tmp_path: Path) -> None:
    first = make_directory("first")
    before = identity_of(first)
    moved = tmp_path / "elsewhere" / "under another name"
    moved.parent.mkdir()
    shutil.copytree(first, moved)
    os.utime(moved / "model.safetensors", ns=(1, 1))
    assert identity_of(moved).fingerprint == before.fingerprint
    first.rename(tmp_path / "renamed")
    assert identity_of(tmp_path / "renamed").fingerprint == before.fingerprint


def test_c03_without_weights_an_explicit_commit_or_nothing(make_directory: MakeDirectory) -> None:
    directory = make_directory("remote", weights=None)
    with pytest.raises(UnverifiedWeights, match="revision"):
        identity_of(directory, name="org/model")
    with pytest.raises(UnverifiedWeights):
        identity_of(directory, name="org/model", revision="main")
    commit = "0123456789" * 4
    by_revision = identity_of(directory, name="org/model", revision=commit)
    assert by_revision.weights == f"revision:org/model@{commit}"
    assert by_revision.is_verified
    unverified = identity_of(directory, name="org/model", allow_unverified=True)
    assert unverified.weights == "unverified:org/model"
    assert not unverified.is_verified
    assert unverified.fingerprint != by_revision.fingerprint


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": 1e-6}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}],
    ids=str,
)
def test_configuration_that_changes_kv_counts(make_directory: MakeDirectory, change: dict[str, Any]) -> None:
    assert identity_of(make_directory("a")).fingerprint != identity_of(make_directory("b", **change)).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "4.0.0"},
        {"torch_dtype": "float32", "dtype": ...},
        {"architectures": ["Other"]},
        {"use_cache": False},
        {"initializer_range": 0.02},
        {"eos_token_id": [2, 3]},
    ],
    ids=str,
)
def test_configuration_that_cannot_change_kv_does_not_count(
    make_directory: MakeDirectory, change: dict[str, Any]
) -> None:
    assert identity_of(make_directory("a")).fingerprint == identity_of(make_directory("b", **change)).fingerprint


def test_name_is_never_a_path(make_directory: MakeDirectory) -> None:
    recorded_path = make_directory("a", _name_or_path="/home/somebody/checkpoint-100")
    assert identity_of(recorded_path).model == "llama"
    for name in ("/models/a", "./a", "~/a", " "):
        with pytest.raises(ModelError, match="name"):
            identity_of(recorded_path, name=name)


def test_dtype_and_chunk_size_are_part_of_it(make_directory: MakeDirectory) -> None:
    directory = make_directory("a")
    kinds = [identity_of(directory, dtype=dtype) for dtype in (Dtype.F32, Dtype.BF16, Dtype.F16)]
    kinds.append(identity_of(directory, chunk_tokens=128))
    assert len({identity.fingerprint for identity in kinds}) == 4
    assert kinds[0] == identity_of(directory)


def test_c05_adapters_are_told_apart_by_content(make_directory: MakeDirectory, tmp_path: Path) -> None:
    base = make_directory("base")

    def adapter(name: str, weights: bytes) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": name}))
        (directory / "adapter_model.safetensors").write_bytes(weights)
        return directory

    a, b = adapter("a", b"adapter A"), adapter("b", b"adapter B")
    cache_dir = tmp_path / "cache"
    plain, with_a, with_b = (identity_of(base, adapter=which, cache_dir=cache_dir) for which in (None, a, b))
    assert plain.adapter is None
    assert len({identity.fingerprint for identity in (plain, with_a, with_b)}) == 3
    assert identity_of(base, adapter=a, cache_dir=cache_dir) == with_a

    weights = a / "adapter_model.safetensors"
    times = weights.stat()
    weights.write_bytes(b"adapter C")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    reloaded = identity_of(base, adapter=a, cache_dir=cache_dir)
    assert reloaded.fingerprint not in {plain.fingerprint, with_a.fingerprint, with_b.fingerprint}


def test_c05_adapter_without_files_is_refused(make_directory: MakeDirectory, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        identity_of(make_directory("base"), adapter=tmp_path)


def settle(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had been written a while ago: fresh ones are not remembered."""
    now = time.time_ns()
    monkeypatch.setattr(digests.time, "time_ns", lambda: now + 60_000_000_000)


def test_remembered_digest_is_dropped_when_the_file_changes_in_place(
    make_directory: MakeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, cache_dir = make_directory("a", weights=b"weights 0"), tmp_path / "cache"
    settle(directory, monkeypatch)
    before = identity_of(directory, cache_dir=cache_dir)
    path = directory / "model.safetensors"
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"weights 0", b"weights 1"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert identity_of(directory, cache_dir=cache_dir).fingerprint != before.fingerprint


def test_fresh_files_are_not_remembered(make_directory: MakeDirectory, tmp_path: Path) -> None:
    identity_of(make_directory("a"), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "file-digests").exists()


def test_second_time_neither_hashes_nor_imports(
    make_directory: MakeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, cache_dir = make_directory("a"), tmp_path / "cache"
    settle(directory, monkeypatch)
    identity = identity_of(directory, cache_dir=cache_dir)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from lmcache_cli.integration.transformers import model_identity, weights_digest\n"
        "weights_digest._hash = None\n"
        "print(model_identity.identify(Path(sys.argv[1]), cache_dir=Path(sys.argv[2])).identity.fingerprint)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, directory, cache_dir], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == identity.fingerprint


def test_damaged_memory_is_only_slower(
    make_directory: MakeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, cache_dir = make_directory("a"), tmp_path / "cache"
    settle(directory, monkeypatch)
    identity = identity_of(directory, cache_dir=cache_dir)
    remembered = list(cache_dir.rglob("*.json"))
    assert len(remembered) == 2
    for rubbish in (b"", b"[]", b'{"file": 1, "request": 2}', b"\xff"):
        for path in remembered:
            path.write_bytes(rubbish)
        assert identity_of(directory, cache_dir=cache_dir) == identity


def test_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model directory"):
        identify(tmp_path / "nothing here")
    with pytest.raises(ModelNotFound, match="download"):
        identify("example-organisation/no-such-model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        identify(tmp_path / "empty")


def test_windows_of_sliding_layers_are_groups(make_directory: MakeDirectory) -> None:
    mistral = identity_of(make_directory("a", model_type="mistral", sliding_window=16))
    assert mistral.groups == (LayerGroup(AttentionKind.SLIDING, 0, 3, 16),)
    mixed = identity_of(
        make_directory(
            "b",
            model_type="gemma3_text",
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
    )
    assert mixed.groups == (LayerGroup(AttentionKind.SLIDING, 0, 1, 16), LayerGroup(AttentionKind.FULL, 1, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "latents"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "no attention layers|of kind"),
        ({"model_type": "qwen3_next"}, "of kind"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 1}, "shares KV"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"model_type": "no_such_architecture"}, "cannot read"),
        ({"dtype": "float8_e4m3fn"}, "type to compute in"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_what_cannot_be_stored_is_refused(make_directory: MakeDirectory, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        identity_of(make_directory("a", **change))


def test_latents_are_identified_for_those_who_pack_them_as_the_format_does(
    make_directory: MakeDirectory, tmp_path: Path
) -> None:
    """What was remembered for vLLM is not served to transformers."""
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
    directory = make_directory("a", model_type="deepseek_v3", **sizes)
    found = identify(directory, with_latents=True, cache_dir=tmp_path / "cache").identity
    assert found == identify(directory, with_latents=True, cache_dir=tmp_path / "cache").identity
    assert found.groups == (LayerGroup(AttentionKind.LATENT, 0, 3),)
    assert (found.is_latent, found.kv_heads, found.head_dim_k, found.head_dim_v) == (True, 1, 40, 0)
    with pytest.raises(UnsupportedModel, match="as nothing else does"):
        identify(directory, cache_dir=tmp_path / "cache")
    plain = make_directory("b")
    assert identify(plain, with_latents=True).identity == identify(plain).identity
    for number, unknown in enumerate(({"model_type": "glm4_moe_lite"}, {"index_topk": 16})):
        with pytest.raises(UnsupportedModel, match="of a kind that this version does not know"):
            identify(
                make_directory(f"c{number}", **{"model_type": "deepseek_v3", **sizes, **unknown}), with_latents=True
            )


def test_adapter_beside_a_model_is_refused(make_directory: MakeDirectory) -> None:
    directory = make_directory("a")
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        identity_of(directory)
