"""``gspo erase``: what people said, gone for good: traffic of keys that just talk, and episodes, trained or not."""

from __future__ import annotations

from collections.abc import Iterable

from gspo_core.api_answers import Entered, ErasedEpisodes
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import counted
from gspo_core.client import Client


def erase(url: str, job: str, *, user: str | None, trace: str | None, episode: str | None) -> int:
    """The status: 1 where something of it could not be erased now."""
    with connected(url) as client:
        if episode is not None:
            return tell(client.erase_episode(f"{job}/{episode}"))
        if user is not None:
            return _user(client, job, user)
        print(f"erased: {counted(client.erase_trace(job, trace or '')['num_segments'], 'recorded segment')}")
    return 0


def _user(client: Client, job: str, user: str) -> int:
    done = client.erase_user(job, user)
    print(f"erased: {counted(done['num_segments'], 'recorded segment')} of keys that just talk")
    return tell(client.erase_episodes(job, user))


def tell(done: ErasedEpisodes) -> int:
    """Prints it; gives the status of the command."""
    steps = len({(one["in_job"], one["epoch"], one["step"]) for one in done["erased"]})
    episodes = len({one["episode"] for one in done["erased"]})
    print(f"erased: {counted(episodes, 'trained episode')} in {counted(steps, 'batch log')}")
    _list(done["erased"])
    print(f"erased: {counted(len(done['queued']), 'episode')} not trained before, nor from now on")
    for name in done["queued"]:
        print(f"  {name}")
    for one in done["in_use"]:
        print(f"not yet: {one['episode']}: {one['why']}")
    if done["not_yet"]:
        print("not yet, for their job is not over and may train these steps again (ask after its next checkpoint):")
        _list(done["not_yet"])
    for problem in done["unreadable"]:
        print(f"could not be looked into: {problem}")
    for reach in done["stays"]:
        print(f"stays: {reach}")
    return 1 if done["in_use"] or done["not_yet"] or done["unreadable"] else 0


def _list(entered: Iterable[Entered]) -> None:
    for one in entered:
        of = "" if one["episode"].startswith(f"{one['in_job']}/") else f", as {one['in_job']} was brought it"
        print(f"  {one['episode']} entered step {one['step']} (epoch {one['epoch']}{of})")
