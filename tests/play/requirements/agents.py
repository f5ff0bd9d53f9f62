"""The agents and tasks of these plays, as the gateway's hosts import them: who is started by a call or as a program.

Run as a program, it plays what ``GSPO_TASK`` says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import httpx

from tests.play.requirements.posts import Post, paths_of, posts_of

TIMEOUT_S = 120.0


class Tasks:
    """``what``: whose tasks they are, which the task says."""

    reward_range = (0.0, 1.0)

    def __init__(self, what: str, number: int, **shared: Any) -> None:
        self.tasks = [{"what": what, "number": one, **shared} for one in range(number)]
        self.eval_tasks = self.tasks[:1]


class Returning(Tasks):
    """A function that plays, and returns what its task says."""

    def run(self, task: Mapping[str, Any], llm: Any) -> float | None:
        told = play(task, llm.base_url, llm.api_key, llm.reward_key)
        report(task, {**told, "episode": llm.episode})
        return float(posts_of(task).returned)


class Judging(Returning):
    """The same beside a judge."""

    def get_reward(self, task: Mapping[str, Any]) -> float:
        return posts_of(task).judged


class JudgedTasks(Tasks):
    """Tasks with a judge, for programs and services."""

    def get_reward(self, task: Mapping[str, Any]) -> float:
        return posts_of(task).judged


def play(task: Mapping[str, Any], base_url: str, own_key: str, reward_key: str) -> dict[str, Any]:
    """Asks for some turns, and posts all that is drawn for this task."""
    drawn, statuses, turns = posts_of(task), list[int](), list[str]()
    root = base_url.removesuffix("/v1")
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
        messages = [{"role": "user", "content": f"Task {task['number']} of {task['what']}."}]
        for number in range(drawn.num_turns):
            asked = {"model": "policy", "messages": messages}
            answer = http.post(f"{base_url}/chat/completions", json=asked, headers=_bearer(own_key))
            answer.raise_for_status()
            turns.append(answer.json()["id"])
            said = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {number}?"}]
        for post in drawn.posts:
            if post.by_own_key or reward_key:
                statuses.append(_post(http, root, post, own_key if post.by_own_key else reward_key, turns))
    return {"statuses": statuses, "keys": [own_key, reward_key]}


def _post(http: httpx.Client, root: str, post: Post, key: str, turns: list[str]) -> int:
    headers = _bearer(key) if post.header == "authorization" else {post.header: key}
    path, said = paths_of(post, turns)
    return http.post(f"{root}{path}", json=said, headers=headers).status_code


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def report(task: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """To the play."""
    said = {"what": task["what"], "number": task["number"], **told}
    httpx.post(f"{task['beside']}/report", json=said, timeout=TIMEOUT_S, trust_env=False)


def main() -> int:
    """As a program: it has the key that samples, and no other."""
    task = json.loads(os.environ["GSPO_TASK"])
    told = play(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "")
    report(task, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
