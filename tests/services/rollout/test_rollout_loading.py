"""What a job needs before an episode can start, and what is said when something is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gspo_core.messages import CallStatus
from gspo_core.starter.tokenizer import chat_template
from services.hosts.local import OF_WALLS, LocalHosts
from services.hosts.venv import Interpreters
from services.workers.loading import JobNotServable, LoadedJob, read_spec
from services.workers.loading import load_job as load_hosted_job
from tests.services.rollout.rollout_kit import write_model

WORLD = """
class World:
    tasks = [{}]
    limits = {"max_turns": 3}

    def reset(self):
        return "go"

    def get_reward(self):
        return 1.0


class Greedy(World):
    limits = {"max_turns": "many"}
"""


async def load_job(spec_text: str) -> LoadedJob:
    """Loaded and closed again."""
    loaded = await load_hosted_job(spec_text, lambda name: None, LocalHosts(Interpreters(Path("nowhere"))).boot)
    await loaded.close()
    return loaded


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", seed=0, stop_bias=0.0)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    path = tmp_path / "world.py"
    path.write_text(WORLD)
    return path


def spec(model: Path, ref: str, changes: dict[str, Any] | None = None) -> str:
    return json.dumps({"model": str(model), "environments": [{"ref": ref}]} | (changes or {}))


XML = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
OWN_FORMAT = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant: {% endif -%}
"""


@pytest.mark.parametrize(
    ("template", "chat", "codec", "num_calls"),
    [
        (None, {}, "HermesCodec", 0),
        (chat_template(), {}, "HermesCodec", 0),
        (chat_template(), {"format": "template"}, "TemplateCodec", 0),
        (OWN_FORMAT, {}, "TemplateCodec", 0),
        (OWN_FORMAT + "{# " + XML + " #}", {}, "TemplateCodec", 1),
        (OWN_FORMAT, {"calls": "qwen_xml"}, "TemplateCodec", 1),
        (OWN_FORMAT + "{# tools #}", {}, "set chat.calls to hermes", 0),
        (OWN_FORMAT, {"format": "hermes"}, "chat.format is hermes, but the model's own template", 0),
        (OWN_FORMAT, {"calls": "llama"}, "chat.calls", 0),
    ],
)
async def test_a_job_gets_the_chat_format_of_its_model(
    model: Path, world: Path, template: str | None, chat: dict[str, str], codec: str, num_calls: int
) -> None:
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    job = spec(model, f"{world}:World", {"chat": chat})
    if not codec.endswith("Codec"):
        with pytest.raises(JobNotServable, match=codec):
            await load_job(job)
        return
    loaded = await load_job(job)
    assert type(loaded.codec).__name__ == codec
    sampled = [*loaded.codec.tokenizer.encode_whole(XML), loaded.codec.stop_ids[0]]
    calls = loaded.codec.parse(sampled).calls
    assert sum(call.status is CallStatus.OK for call in calls) == num_calls


async def test_a_sound_job_is_loaded(model: Path, world: Path) -> None:
    loaded = await load_job(spec(model, f"{world}:World"))
    assert loaded.context_tokens == 4096
    assert loaded.vocab_size == json.loads((model / "config.json").read_text())["vocab_size"]
    assert loaded.spec.episode_limits(0, loaded.environments[0].limits).max_turns == 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Nobody", {}, "has no 'Nobody'"),
        ("Greedy", {}, "max_turns"),
        ("World", {"model": "/nowhere/at/all"}, "cannot be used"),
        ("World", {"sampling": {"top_p": 0.5}}, "top_p"),
        ("World", {"unheard_of": 1}, "cannot read the stored specification"),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    model: Path, world: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobNotServable, match=message):
        await load_job(spec(model, f"{world}:{name}", changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "the tokenizer has 265 ids, but the model only 100"),
        ({"max_position_embeddings": None}, "no integer max_position_embeddings"),
        ({"eos_token_id": 7}, "eos_token_id 7"),
        ({"eos_token_id": [258, 7]}, "eos_token_id"),
    ],
)
async def test_a_model_that_does_not_fit_its_tokenizer_is_refused(
    model: Path, world: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(JobNotServable, match=message):
        await load_job(spec(model, f"{world}:World"))


async def test_what_an_operator_withholds_from_hosts_makes_a_job_unservable(model: Path, world: Path) -> None:
    entry = {"ref": f"{world}:World", "host": {"network": True, "tier": "wall"}}
    with pytest.raises(JobNotServable, match="GSPO_ENV_NETWORK"):
        await load_job(spec(model, "", {"environments": [entry]}))


def test_a_job_that_says_nothing_of_walls_is_stored_as_older_releases_read_it(model: Path, world: Path) -> None:
    stored = read_spec(spec(model, f"{world}:World")).model_dump(mode="json")
    assert stored["environments"][0]["host"].keys().isdisjoint(OF_WALLS)


async def test_an_environment_that_does_not_close_keeps_none_of_the_others_open() -> None:
    """Nor does its error stand in for a cancellation: whoever is told to end would go on."""
    closing, closed, may_end = asyncio.Event(), list[str](), asyncio.Event()

    class Broken:
        async def close(self) -> None:
            raise LookupError("a defect")

    class Slow:
        async def close(self) -> None:
            closing.set()
            await may_end.wait()
            closed.append("slow")

    loaded = LoadedJob(None, [Broken(), Slow()], None, 1, 1)  # type: ignore[arg-type, list-item]
    ending = asyncio.create_task(loaded.close())
    await closing.wait()
    may_end.set()
    await ending
    assert closed == ["slow"]
    may_end.clear()
    closing.clear()
    ending = asyncio.create_task(loaded.close())
    await closing.wait()
    ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
