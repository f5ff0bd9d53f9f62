"""Requirement 2: nobody pays himself. Agents of three ways post rewards with the key that they have, wherever they can.

Of each episode is judged: what every post was answered, that the stored reward is what the job's word says, and that
the refused ones are counted in the episode and in the steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_core.api_answers import EpisodeDetail
from tests.play.requirements.agents import play, report
from tests.play.requirements.figures import ROOT, Figure
from tests.play.requirements.place import Place
from tests.play.requirements.posts import COMMAND, FUNCTION, SERVICE, WAYS, WORDS, due, posts_of

HERE = "tests.play.requirements.agents"
STEPS, GROUPS_PER_STEP = 12, 4
JOB_S = 400.0


def entries(seed: int, beside: str) -> Iterator[dict[str, Any]]:
    """One for each way and word that go together: what a program returns is no reward."""
    for way in WAYS:
        for word in WORDS:
            if (way, word) == (COMMAND, "returned"):
                continue
            judges = word == "judge" or (word == "" and way == COMMAND)
            config = {"what": f"{way} {word}".strip(), "number": 40, "way": way, "word": word, "judges": judges}
            agent: dict[str, Any] = {"rewards": word} if word else {}
            names = {FUNCTION: ("Returning", "Judging"), COMMAND: ("Tasks", "JudgedTasks")}
            names[SERVICE] = names[COMMAND]
            if way == COMMAND:
                agent["command"] = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", HERE]
            elif way == SERVICE:
                agent["url"] = f"{beside}/play"
            shared = {"seed": seed, "beside": beside}
            yield {"ref": f"{HERE}:{names[way][judges]}", "config": {**config, **shared}, "agent": agent}


def pay(place: Place) -> Figure:
    figure = Figure(
        2,
        "nobody pays himself",
        "functions, programs and services, each with the job's words (none, `returned`, `judge`, `posted`), post "
        "rewards of episodes and turns with the key that samples and, where they have it, with the one that pays: to "
        "the path for it, to paths that there are not, and as fields of requests; a quarter of them outside the range",
    )
    place.beside.service = lambda given: _serve(given, place.beside.url)
    given = list(entries(place.seed, place.beside.url))
    with place.job("pay", given, steps=STEPS, groups_per_step=GROUPS_PER_STEP) as job:
        place.until(lambda: place.client.job(job)["status"] in ("succeeded", "failed"), "pay has ended", JOB_S)
        figure.expect(place.client.job(job)["status"] == "succeeded", f"the job is {place.client.job(job)['status']}")
        episodes = [place.client.episode(one["id"]) for one in place.client.episodes(job)]
        num_refused = sum(_judged(figure, one) for one in episodes)
        counted = sum(one.get("rewards/refused", 0.0) for one in place.client.metrics(job))
    figure.expect(counted == num_refused, f"rewards/refused of the steps is {counted:g} and {num_refused} were due")
    figure.count("`rewards/refused` of the steps", counted)
    reports = place.beside.reports
    for one in reports:
        _judged_report(figure, place, one)
    figure.expect(len(reports) >= len(episodes), f"{len(reports)} agents told of {len(episodes)} episodes")
    told = figure.told
    figure.held = (
        f"{told('stored as the word says')} of {len(episodes)} stored rewards are what the job's word "
        f"says; {told('posts answered as due')} of {told('posts')} posts were answered as due"
    )
    return figure


def _serve(given: Mapping[str, Any], beside: str) -> Mapping[str, Any]:
    task = given["task"]
    told = play(task, given["base_url"], given["api_key"], given["reward_key"])
    report({**task, "beside": beside}, {**told, "episode": given["episode"]})
    return {"reward": posts_of(task).returned}


def _judged(figure: Figure, episode: EpisodeDetail) -> int:
    """How many of its posts had to be refused."""
    task: Any = episode.get("evidence", {}).get("task")
    if not figure.expect(isinstance(task, Mapping), f"an episode has no task: {episode['stop_reason']}"):
        return 0
    wanted, what = due(task), task["what"]
    figure.count("episodes")
    figure.count(f"of a {task['way']}")
    reward = episode["reward"]
    is_it = reward is not None and math.isclose(reward, wanted.reward, abs_tol=1e-9)
    if figure.expect(is_it, f"{what}: stored {reward}, due {wanted.reward:.3f} ({episode['stop_reason']})"):
        figure.count("stored as the word says")
    refused = int(episode["metrics"].get("rewards_refused", -1))
    figure.expect(refused == wanted.num_refused, f"{what}: {refused} refused in its metrics, {wanted.num_refused} due")
    return wanted.num_refused


def _judged_report(figure: Figure, place: Place, told: Mapping[str, Any]) -> None:
    place.keys |= {one for one in told["keys"] if one}
    way, _, word = told["what"].partition(" ")
    task = {
        "seed": place.seed,
        "what": told["what"],
        "number": told["number"],
        "way": way,
        "word": word,
        "judges": False,
    }
    posts, wanted = posts_of(task).posts, due(task).statuses
    for post, status, meant in zip(posts, told["statuses"], wanted, strict=True):
        figure.count("posts")
        figure.count(f"by the key that {'samples' if post.by_own_key else 'pays'}")
        figure.count("refused", status != 200)
        if not 0 <= post.value <= 1 and post.reaches_payer:
            figure.count("outside the range, refused", status != 200)
            figure.expect(status != 200, f"{told['what']}: {post.value} was taken")
        whose = f"{told['what']}: {post.kind} {post.value} by {'own' if post.by_own_key else 'reward'} key"
        if figure.expect(status == meant, f"{whose} was answered {status}, due {meant}"):
            figure.count("posts answered as due")
