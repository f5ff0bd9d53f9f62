"""Runs an installation elsewhere from its start to its end: until its job is over, or until told to leave.

Duty: make the secrets, start the crew, submit the job under its key, look after both, and let the crew leave however it
ends. A job that was submitted before under the same key is the same job, so whatever starts this again goes on with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from services.launch.crew import LOOK_S, Crew, CrewError, CrewPlace
from services.launch.first_secrets import BadSecret, make_secrets
from services.launch.follower import API_AWAY
from services.launch.installation import Installation
from services.launch.only_one import RunsAlready, only_one
from services.launch.placement import described
from services.launch.stack import terminate_as_interrupt
from services.process.children import die_with_parent

TOLD_TO_LEAVE = 128 + signal.SIGTERM
# Beside what the follower itself waits; an API that starts again takes longer.
FOLLOW_AGAIN_S = 5.0


@dataclass(frozen=True)
class Submission:
    job: Path
    key: str


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def run(installation: Installation, place: CrewPlace, submission: Submission | None) -> int:
    """The exit status: that of following the job, 1 if the installation could not start, 143 when told to leave."""
    for folder in (installation.data_dir.logs, installation.data_dir.redis):
        folder.mkdir(parents=True, exist_ok=True)
    with terminate_as_interrupt():
        try:
            with only_one(installation.data_dir.redis, say):
                return _run(installation, place, submission)
        except KeyboardInterrupt:  # while it waited for another one's end
            return TOLD_TO_LEAVE
        except (RunsAlready, BadSecret) as error:
            say(str(error))
            return 1


def _run(installation: Installation, place: CrewPlace, submission: Submission | None) -> int:
    make_secrets(installation.data_dir.secrets.path, f"{installation.hosts[0]}:{installation.ports.redis}")
    print(described(installation.members, nodes=len(installation.hosts)), flush=True)
    crew = Crew(installation, place, say)
    follower: _Follower | None = None
    try:
        crew.start()
        crew.until_ready()
        key_file = installation.data_dir.secrets.secret("api", "gspo_api_keys")
        print(f"API: {installation.api_url} (key: {key_file})", flush=True)
        if submission is not None:
            follower = _Follower(installation, submission, key_file.read_text().strip())
        while follower is None or (code := follower.poll()) is None:
            crew.look()
            time.sleep(LOOK_S)
        return code
    except KeyboardInterrupt:
        say("asked to leave")
        return TOLD_TO_LEAVE
    except CrewError as error:  # told before they leave, which takes its time
        say(str(error))
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # leaving has its own time limits
            signal.signal(number, signal.SIG_IGN)
        if follower is not None:
            follower.leave()
        crew.leave()


class _Follower:
    """Submits the job and follows it; started again while the API is away, which the crew starts again itself."""

    def __init__(self, installation: Installation, submission: Submission, api_key: str) -> None:
        self._words = [f"--key={submission.key}", "--url", installation.api_url, "--", str(submission.job)]
        self._api_key = api_key
        self._again_at: float | None = None
        self._process = self._started()

    def poll(self) -> int | None:
        """Its exit status once the job is over, or was refused."""
        if self._again_at is not None:
            if time.monotonic() >= self._again_at:
                self._again_at, self._process = None, self._started()
            return None
        code = self._process.poll()
        if code is not None and (code == API_AWAY or code < 0):
            say(f"the job is not followed any more; going on with it in {FOLLOW_AGAIN_S:.0f} s")
            self._again_at = time.monotonic() + FOLLOW_AGAIN_S
            return None
        return code

    def leave(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "services.launch.follower", *self._words],
            env={**os.environ, "GSPO_API_KEY": self._api_key},
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
