"""`lmcache warm` with vLLM: as the one that computes and saves, and as the one that is to load."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lmcache_cli.commands.warm_reports import show_plan, show_result
from lmcache_cli.settings import user_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_cli.commands.warm_options import WarmJob
    from lmcache_cli.exit_codes import ExitCode
    from lmcache_cli.integration.producer import Producer, TokenIds
    from lmcache_cli.integration.vllm.engine_process import EngineProcess
    from lmcache_cli.integration.warming import WarmDocument


def warm_with_vllm(job: WarmJob, *, dry_run: bool) -> ExitCode:
    """Start an engine with the connector and have it compute what is missing."""
    from lmcache_cli.integration.asked_warming import warm_through

    if dry_run:
        return show_plan(job, lambda tokens: _tokens_per_s(job, tokens))
    total = sum(len(document.tokens) for document in job.documents)
    with ExitStack() as stack:

        def start() -> EngineProcess:
            return stack.enter_context(_start(job, job.documents))

        with job.session.output.progress("warm", total=total, unit="tokens") as meter:
            report = warm_through(job.namespace, start, job.documents, progress=meter.advance)
    return show_result(job, report)


def probe_with_vllm(job: WarmJob, load: Callable[[], Producer]) -> None:
    """Compare what the producer computes with what vLLM does, and record it. Raises `NotAccepted` with the figures."""
    from lmcache_cli.integration.vllm.probing import compare_with_vllm, compute_with_vllm, probe_tokens
    from lmcache_cli.store.acceptances import write_acceptance

    output, identity = job.session.output, job.model.identity
    output.note("starting vLLM for a probe")
    computed = compute_with_vllm(
        job.model.directory,
        identity,
        probe_tokens([document for document in job.documents if len(document.tokens)]),
        allow_unverified=job.allow_unverified,
        cache_dir=user_cache_dir(),
        engine=job.choice.vllm_options(),
        revision=job.revision,
    )
    probe = compare_with_vllm(load(), computed, job.store.backend.now_ms())
    write_acceptance(job.store.backend, probe.acceptance)
    found = probe.acceptance
    output.record(
        "probe",
        {
            "producer": dict(found.producer),
            "consumer": dict(found.consumer),
            "passed": found.passed,
            "relative_l2": round(found.relative_l2, 6),
            "cosine": round(found.cosine, 6),
            "num_tokens": found.num_tokens,
            "worst": f"layer {probe.worst.layer} {probe.worst.side}",
        },
    )
    probe.require()


def _start(job: WarmJob, documents: Sequence[WarmDocument], **options: Any) -> EngineProcess:
    from lmcache_cli.integration.vllm.engine_process import EngineProcess, EngineSpec, connector_options
    from lmcache_cli.integration.vllm.probing import dtype_name, refuse_other_namespace, token_bytes

    identity = job.model.identity
    job.session.output.note(f"starting vLLM with {identity.model}")
    connector = connector_options(
        job.session.settings.required_store(),
        identity.chunk_tokens,
        cache_dir=user_cache_dir(),
        model_name=identity.model,
        allow_unverified=job.allow_unverified,
        encoding=job.write.codec,
        durability=job.write.durability.value,
        **options,
    )
    spec = EngineSpec(
        str(job.model.directory),
        dtype_name(identity),
        max(len(document.tokens) for document in documents),
        job.choice.at_once,
        token_bytes(identity),
        connector,
        piece_tokens=job.choice.piece_tokens,
        revision=job.revision,
        engine=job.choice.vllm_options(),
    )
    engine = EngineProcess(spec, documents)
    try:
        refuse_other_namespace(engine.ready, identity)
    except BaseException:
        engine.close()
        raise
    return engine


def _tokens_per_s(job: WarmJob, tokens: TokenIds) -> float:
    """Prefill speed on the beginning of a prompt; what is computed is not kept."""
    from lmcache_cli.integration.warming import PROBE_TOKENS, WarmDocument

    probe = WarmDocument("probe", tokens[:PROBE_TOKENS])
    with _start(job, [probe], load=False, save=False) as engine:
        started = time.perf_counter()
        list(engine.ask([0]))
        return len(probe.tokens) / (time.perf_counter() - started)
