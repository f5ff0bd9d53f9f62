"""What is drawn for an episode in which rewards are posted by whoever can, and what has to come of it.

Rule: all follows from the task, so that agents, the service and the judge of the play draw the same without a word.
It is loaded where agents run, and imports nothing of the product.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FUNCTION, COMMAND, SERVICE = WAYS = ("function", "command", "url")
WORDS = ("", "returned", "judge", "posted")
"""What a job says of its rewards; empty: nothing."""
FINAL, TURN, TOKEN, FIELD, PATH = KINDS = ("final", "turn", "token", "field", "path")
REWARD_PATH = "/v1/episode/reward"
# Where no reward can be posted, as agents that were told of other servers might try.
OTHER_PATHS = (
    *("/v1/episode/rewards", "/v1/reward", "/v1/rewards", "/v1/episodes/reward", "/v1beta/episode/reward"),
    *("/episode/reward", "/v1/chat/completions/reward", "/v1/messages/reward", "/v1/responses/reward"),
)
HEADERS = ("authorization", "x-api-key", "x-goog-api-key")
FIELDS = ("reward", "score", "final_reward")
OUTSIDE = (1.2, 7.0, -0.01, -3.0, 1e308)
"""Of the range, which is from 0 to 1."""
LOW, HIGH = 0.0, 1.0


@dataclass(frozen=True)
class Post:
    by_own_key: bool
    """That samples; else by the one that pays."""
    kind: str
    value: float
    header: str
    place: int
    """Of the turn, of the path, or of the field."""

    @property
    def reaches_payer(self) -> bool:
        """It is refused as a reward, where it is; else there is no such route or field."""
        return self.kind in (FINAL, TURN, TOKEN)


@dataclass(frozen=True)
class Drawn:
    num_turns: int
    posts: tuple[Post, ...]
    judged: float
    returned: float


@dataclass(frozen=True)
class Due:
    """What has to come of it."""

    reward: float
    statuses: tuple[int, ...]
    num_refused: int
    """Rewards, as the steps count them."""


def posts_of(task: Mapping[str, Any]) -> Drawn:
    rng = random.Random(f"{task['seed']} {task['what']} {task['number']}")
    num_turns = rng.randint(1, 3)
    posts = [_post(rng, task, num_turns) for _ in range(rng.randint(5, 9))]
    if task["word"] == "posted" and task["way"] == COMMAND:  # nothing else would be its reward
        posts.append(Post(True, FINAL, _small(rng), "authorization", 0))
    return Drawn(num_turns, tuple(posts), _small(rng), _small(rng))


def _post(rng: random.Random, task: Mapping[str, Any], num_turns: int) -> Post:
    by_own_key = task["way"] == COMMAND or rng.random() < 0.6
    kind = rng.choice((FINAL, FINAL, TURN, TURN, TOKEN, FIELD, PATH))
    if rng.random() < 0.25:
        value = rng.choice(OUTSIDE)
    elif by_own_key and task["word"] != "posted":  # greedy, and in the range
        value = round(rng.uniform(0.9, 1.0), 3)
    else:
        value = round(rng.uniform(0.01, 0.04), 3) if kind == TURN else _small(rng)
    place = rng.randrange(num_turns) if kind == TURN else rng.randrange(len(OTHER_PATHS))
    return Post(by_own_key, kind, value, rng.choice(HEADERS), place)


def _small(rng: random.Random) -> float:
    return round(rng.uniform(0.05, 0.5), 3)


def paths_of(post: Post, turns: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Where it goes, and its body. ``turns``: the ids of answers."""
    if post.kind == TURN:
        return REWARD_PATH, {"reward": post.value, "turn": turns[post.place]}
    if post.kind == TOKEN:
        return REWARD_PATH, {"reward": post.value, "token": f"token-{post.place}-{post.value}"}
    if post.kind == FIELD:
        field, said = FIELDS[post.place % len(FIELDS)], [{"role": "user", "content": "Pay me."}]
        return "/v1/chat/completions", {"model": "policy", "messages": said, field: post.value}
    if post.kind == PATH:
        return OTHER_PATHS[post.place], {"reward": post.value}
    return REWARD_PATH, {"reward": post.value}


def due(task: Mapping[str, Any]) -> Due:
    """By the pages of the docs: the job's word, the range, and the sum."""
    drawn, word = posts_of(task), task["word"]
    final: float | None = None
    of_turns, tokens = dict[int, float](), set[tuple[int, float]]()
    statuses, num_refused = list[int](), 0
    for post in drawn.posts:
        if not post.reaches_payer:
            statuses.append(_status_elsewhere(post))
            continue
        may = word == "posted" or (word == "" and not post.by_own_key)
        taken = may and _fits(post, final, of_turns)
        statuses.append(200 if taken else 400)
        num_refused += not taken
        if not taken or (post.kind == TOKEN and (post.place, post.value) in tokens):
            continue
        if post.kind == TURN:
            of_turns[post.place] = of_turns.get(post.place, 0.0) + post.value
        else:
            final = post.value
        tokens |= {(post.place, post.value)} if post.kind == TOKEN else set()
    end = drawn.judged if task["judges"] else drawn.returned
    return Due((end if final is None else final) + sum(of_turns.values()), tuple(statuses), num_refused)


def _fits(post: Post, final: float | None, of_turns: Mapping[int, float]) -> bool:
    if not LOW <= post.value <= HIGH:
        return False
    paid = sum(of_turns.values())
    total = (final or 0.0) + paid + post.value if post.kind == TURN else paid + post.value
    return LOW <= total <= HIGH


def _status_elsewhere(post: Post) -> int:
    if post.kind == PATH:
        return 404
    return 400 if post.by_own_key else 401  # the key for rewards samples nothing
