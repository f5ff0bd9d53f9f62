"""What an environment shows is bounded, visibly, and alike each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gspo_core.env import Start
from gspo_core.episode_limits import within
from gspo_core.messages import Message
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey
from services.episodes.history import Conversation
from services.episodes.metering import Counters
from services.episodes.tree import Ledger
from tests.services.rollout.rollout_kit import Speech, load_codec, sampled


def test_what_fits_is_handed_on_as_it_is() -> None:
    messages: list[Message] = [
        {"role": "tool", "content": "x" * 100},
        {"role": "tool", "content": [{"type": "text", "text": "y" * 100}, {"type": "image"}]},
        {"role": "tool", "content": None},
    ]
    assert within(messages, 100) == (messages, 0)


@given(text=st.text(min_size=101, max_size=400), in_parts=st.booleans())
def test_a_cut_keeps_both_ends_and_says_how_much_is_missing(text: str, in_parts: bool) -> None:
    content: Any = [{"type": "text", "text": text[:60]}, {"type": "text", "text": text[60:]}] if in_parts else text
    ((message,), num_cut) = within([{"role": "tool", "content": content, "name": "read"}], 100)
    shown = message["content"][0]["text"] if in_parts else message["content"]
    marker = f"\n[... {len(text) - 100} characters left out ...]\n"
    assert shown == text[:75] + marker + text[-25:]
    assert (num_cut, message["name"]) == (1, "read")


def test_an_observation_of_25_megabytes_costs_the_policy_what_the_job_allows(tmp_path: Path) -> None:
    codec, counters = load_codec(tmp_path), Counters()
    ledger = Ledger(EpisodeKey("job", 0, 0), 0, 1.0)
    history = Conversation(codec, ledger, counters, 10_000_000, 1000)
    history.begin(Start([{"role": "user", "content": "go"}], ()))
    said = Speech(codec).say("so")
    ledger.record(sampled(said))
    before = history.ledger.num_tokens
    assert history.read(history.parse(), [{"role": "tool", "content": "a" * 25_000_000}]) is None
    assert history.ledger.num_tokens - before < 2000
    assert "24999000 characters left out" in history.messages[-1]["content"]
    assert counters["observations/cut"] == 1


def test_a_job_may_set_the_bound() -> None:
    given = {"model": "m", "environments": [{"ref": "a.b:C"}], "limits": {"max_observation_chars": 500}}
    spec = JobSpec.model_validate(given)
    assert spec.episode_limits(0).max_observation_chars == 500
    assert JobSpec.model_validate(given | {"limits": {}}).episode_limits(0).max_observation_chars == 100_000
