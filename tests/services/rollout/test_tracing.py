"""Traces of episodes, read from an exporter in memory; and that nobody pays for them who did not ask."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from redis.asyncio import Redis

from gspo_core.types import StopReason
from services.episodes.policy import Drained, Sampled
from services.process.tracing import Traces
from services.workers.episode import Episode
from tests.services.rollout.rollout_kit import (
    JOB,
    ScriptedPolicy,
    Speech,
    Table,
    load_codec,
    make_order,
    make_setting,
    sampled,
)


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


async def test_an_episode_is_one_trace_over_all_its_workers(
    redis_client: Redis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    codec = load_codec(tmp_path_factory.mktemp("model"))
    speech, table = Speech(codec), await Table.lay(redis_client)
    call, say = speech.call("add", amount=2), speech.say("it is done now")

    async def leave(input_ids: list[int]) -> Sampled:
        raise Drained

    spans: list[ReadableSpan] = []
    await table.dispatch()
    for number, answers in enumerate(([call, sampled(say[:5]), leave], [say[5:]])):
        (lease,) = await table.lease()
        traces = Traces(exporter := InMemorySpanExporter(), "rollout", worker=f"worker-{number}")
        setting = replace(make_setting(table, codec, ScriptedPolicy(answers)), spans=traces)
        episode = Episode(setting, make_order(lease))
        if number:
            assert await episode.run() is StopReason.COMPLETED
        else:
            with pytest.raises(Drained):
                await episode.run()
            await table.bus.hand_back(JOB, table.token, [lease.key])
        traces.close()
        spans += exporter.get_finished_spans()
    assert len({trace_id(span) for span in spans}) == 1
    roots = [span for span in spans if span.name == "episode"]
    assert [span.attributes["gspo.episode"] for span in roots if span.attributes] == [str(lease.key)] * 2
    assert {span.resource.attributes["worker"] for span in roots} == {"worker-0", "worker-1"}
    ids = {span.context.span_id for span in roots if span.context}
    pieces = [span for span in spans if span.name != "episode"]
    assert all(span.parent is not None and span.parent.span_id in ids for span in pieces)
    assert [span.name for span in pieces].count("engine") == 4  # one of them was left in
    phases = [span.attributes["gspo.phase"] for span in pieces if span.name == "environment" and span.attributes]
    assert {"start", "act", "score"} <= set(phases)


def test_a_share_of_the_episodes_is_traced_whole_or_not_at_all() -> None:
    spans: list[ReadableSpan] = []
    for _ in range(2):  # the same ones by every worker
        traces = Traces(exporter := InMemorySpanExporter(), "rollout", share=0.5)
        for number in range(200):
            with traces.trace("episode", f"job/0/{number}"), traces.span("engine"):
                pass
        traces.close()
        spans += exporter.get_finished_spans()
    by_trace = [trace_id(span) for span in spans]
    assert 60 < len(set(by_trace)) < 140
    assert {by_trace.count(one) for one in by_trace} == {4}


def test_who_does_not_ask_for_traces_imports_nothing_for_them() -> None:
    # The Redis client imports what it finds of it by itself, so not the whole worker is asked.
    code = (
        "import sys, services.process.tracing; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_packages_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from services.process.tracing import open_traces
open_traces("http://127.0.0.1:1/v1/traces", "rollout")
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "pip install 'gspo[otel]'" in ended.stderr
