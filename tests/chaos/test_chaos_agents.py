"""The judge of agents against evidence that was forged: nothing is said of what is sound, and each forgery is found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from services.state.keys import service_key
from services.state.server import RedisServer
from tests.chaos import judge_agents, judge_remains
from tests.chaos.judge_tokens import turns
from tests.chaos.talk import Talker, write_tokenizer

RUN = "abcdef"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Talker:
    write_tokenizer(directory := tmp_path_factory.mktemp("model"))
    return Talker(directory)


class Episode:
    """Of one turn."""

    def __init__(self, talker: Talker, work: Path) -> None:
        prompt = talker.codec.render(
            [{"role": "system", "content": "Add up."}, {"role": "user", "content": f"task 700 {RUN}"}]
        )
        said = talker.turn(prompt, talker.codec.tokenizer.encode("a")[0])
        mask = np.array([False] * len(prompt) + [True] * len(said))
        branch = SimpleNamespace(token_ids=np.array([*prompt, *said]), action_mask=mask)
        self.trajectory = SimpleNamespace(key="job:0:0", branches=[branch], num_turns=1)
        self.mask = mask
        parsed = talker.codec.parse(said)
        numbers = [judge_agents._number(call.arguments) for call in parsed.calls]
        self.heard: list[dict[str, Any]] = [{"run": RUN, "turn": 0, "text": parsed.text, "numbers": numbers}]
        self.letters: list[dict[str, Any]] = []
        self.noted: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self._work = work

    def problems(self, talker: Talker) -> list[str]:
        work = self._work
        write(work / "heard-ledger-1-0", self.heard)
        write(work / "agents.jsonl", self.noted)
        evidence: Any = SimpleNamespace(work=work, samples=self.letters, faults=self.faults)
        environment = SimpleNamespace(config={"ledger": "somewhere/ledger-1-0"}, ref="made:Agents")
        spec = SimpleNamespace(is_of_agents=True, environments=[environment])
        batch = SimpleNamespace(groups=[SimpleNamespace(trajectories=[self.trajectory])])
        job: Any = SimpleNamespace(id="job", spec=spec, batches={(1, 1): batch}, hits=self.faults)
        return [
            *judge_agents.only_what_was_heard_is_trained(evidence, job, talker),
            *judge_agents.agents_come_to_their_end(evidence, job),
            *judge_agents.no_agent_failed(evidence),
        ]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def episode(talker: Talker, tmp_path: Path) -> Episode:
    return Episode(talker, tmp_path)


def test_an_episode_whose_agent_heard_what_is_trained_is_sound(episode: Episode, talker: Talker) -> None:
    episode.heard += [episode.heard[0], {"event": "broke", "run": RUN, "turn": 0}]
    episode.noted = [
        {"event": "began", "run": RUN, "episode": "a"},
        {"event": "ended", "run": RUN},
        {"event": "began", "run": "fedcba", "episode": "b"},
        {"event": "was over", "run": "fedcba"},
    ]
    episode.letters = [{"kind": "dead letter", "job": "job", "group": 0, "reason": "its record cannot be read"}]
    assert len(list(turns(episode.mask.tolist()))) == 1
    assert episode.problems(talker) == []


def test_a_turn_that_nobody_heard_is_found(episode: Episode, talker: Talker) -> None:
    episode.heard.clear()
    assert "its agent heard None" in episode.problems(talker)[0]


def test_a_turn_of_which_another_was_heard_is_found(episode: Episode, talker: Talker) -> None:
    episode.heard[0]["text"] = "something else"
    assert "something else" in episode.problems(talker)[0]


def test_two_answers_to_one_request_are_found(episode: Episode, talker: Talker) -> None:
    episode.heard.append({**episode.heard[0], "numbers": [1, 2]})
    assert "and then" in episode.problems(talker)[0]


def test_who_is_played_anew_since_the_queue_was_lost_may_hear_another_answer(episode: Episode, talker: Talker) -> None:
    episode.heard.insert(0, {**episode.heard[0], "numbers": [1, 2]})
    episode.heard += [{**episode.heard[1], "turn": turn} for turn in (1, 2)]
    episode.noted = [
        {"event": "began", "run": RUN, "episode": "a"},
        {"event": "failed", "run": RUN, "why": "AuthenticationError: 401"},
    ]
    assert len(episode.problems(talker)) == 3
    episode.faults = [{"kind": "flushall"}]
    assert episode.problems(talker) == []


def test_what_was_heard_and_is_not_trained_is_found(episode: Episode, talker: Talker) -> None:
    episode.heard += [{**episode.heard[0], "turn": turn} for turn in (1, 2)]
    assert "heard 3 turns, 1 of them are trained" in episode.problems(talker)[0]


def test_a_false_branch_is_found(episode: Episode, talker: Talker) -> None:
    episode.trajectory.branches *= 2
    assert "has 2 branches" in episode.problems(talker)[0]


def test_of_one_turn_it_may_be_unknown_whether_it_was_heard_of_two_it_is_not(episode: Episode, talker: Talker) -> None:
    episode.trajectory.branches.clear()
    assert episode.problems(talker) == []
    episode.trajectory.num_turns = 2
    assert "none of its 2 turns is trained" in episode.problems(talker)[0]


def test_an_episode_that_was_given_up_is_found(episode: Episode, talker: Talker) -> None:
    episode.letters = [{"kind": "dead letter", "job": "job", "group": 7, "reason": "the agent failed"}]
    assert "group 7 was given up: the agent failed" in episode.problems(talker)[0]


def test_an_agent_that_failed_is_found_and_one_that_was_begun_twice(episode: Episode, talker: Talker) -> None:
    episode.noted = [
        {"event": "began", "run": RUN, "episode": "a"},
        {"event": "failed", "run": RUN, "why": "OSError"},
        {"event": "began", "run": "fedcba", "episode": "a"},
    ]
    failed, twice = episode.problems(talker)
    assert "failed: OSError" in failed
    assert "begun by two agents" in twice


def test_dead_workers_may_be_listed_as_long_as_the_rule_says_and_no_longer(tmp_path: Path) -> None:
    with RedisServer.spawn(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        names = [f"worker-{number}" for number in range(20)]
        for number, name in enumerate(names):
            client.hset(service_key("workers"), name, "{}")
            client.zadd(service_key("worker_signs"), {name: number})
        client.hset(service_key("signs"), "worker", 20 * judge_remains.SIGNS_KEPT)
        assert list(judge_remains._dead_are_forgotten(client)) == []
        client.hset(service_key("signs"), "worker", 20 * judge_remains.SIGNS_KEPT + 10)
        assert "11 of 20 workers are listed longer" in next(judge_remains._dead_are_forgotten(client))
        client.zrem(service_key("worker_signs"), *names[:12])
        assert "12 entries are left in workers" in next(judge_remains._dead_are_forgotten(client))
