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
from services.launch.installation import Installation
from services.launch.only_one import RunsAlready, only_one
from services.launch.placement import described
from services.launch.stack import terminate_as_interrupt
from services.process.children import die_with_parent

TOLD_TO_LEAVE = 128 + signal.SIGTERM


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
    follower: subprocess.Popen[bytes] | None = None
    try:
        crew.start()
        crew.until_ready()
        key_file = installation.data_dir.secrets.secret("api", "gspo_api_keys")
        print(f"API: {installation.api_url} (key: {key_file})", flush=True)
        if submission is not None:
            follower = _follow(installation, submission, key_file.read_text().strip())
        while follower is None or follower.poll() is None:
            crew.look()
            time.sleep(LOOK_S)
        return follower.returncode
    except KeyboardInterrupt:
        say("asked to leave")
        return TOLD_TO_LEAVE
    except CrewError as error:  # told before they leave, which takes its time
        say(str(error))
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # leaving has its own time limits
            signal.signal(number, signal.SIG_IGN)
        if follower is not None and follower.poll() is None:
            follower.terminate()
            follower.wait()
        crew.leave()


def _follow(installation: Installation, submission: Submission, api_key: str) -> subprocess.Popen[bytes]:
    entry = "import sys; from gspo_core.cli import main; sys.exit(main())"
    words = ["submit", str(submission.job), f"--key={submission.key}", "--watch", "--url", installation.api_url]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", entry, *words],
        env={**os.environ, "GSPO_API_KEY": api_key},
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
