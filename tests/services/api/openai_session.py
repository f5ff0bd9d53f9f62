"""Run under a Python that has the `openai` package and nothing of ours: what a user of that client does.

python openai_session.py BASE_URL KEY MODEL
"""

from __future__ import annotations

import json
import sys

import openai


def main() -> None:
    base_url, key, model = sys.argv[1:]
    client = openai.OpenAI(base_url=base_url, api_key=key)
    jobs = client.fine_tuning.jobs
    said: dict[str, object] = {"client": openai.__version__}
    job = jobs.create(
        model=model,
        training_file="env:environments.calculator:Calculator",
        suffix="from-openai",
        seed=7,
        metadata={"team": "a"},
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": {"type": "env"}, "hyperparameters": {"batch_size": 4}},  # type: ignore[typeddict-item]
        },
        extra_body={"steps": 11, "rollout": {"group_size": 4}},
    )
    said["created"] = [job.object, job.status, job.seed, job.metadata, job.model_extra["steps"], job.training_file]
    again = jobs.create(model=model, training_file="env:a.b:C", extra_headers={"Idempotency-Key": "k"})
    replay = jobs.create(model=model, training_file="env:a.b:C", extra_headers={"Idempotency-Key": "k"})
    said["replayed"] = again.id == replay.id
    said["listed"] = [one.id == job.id for one in jobs.list(limit=1)]
    said["by_label"] = [one.id for one in jobs.list(metadata={"team": "a"})] == [job.id]
    said["retrieved"] = jobs.retrieve(job.id).id == job.id
    said["paused"] = jobs.pause(job.id).status
    said["resumed"] = jobs.resume(job.id).status
    said["cancelled"] = jobs.cancel(job.id).status
    said["events"] = [event.type for event in jobs.list_events(job.id, limit=1)]
    said["checkpoints"] = [one.step_number for one in jobs.checkpoints.list(job.id)]
    said["models"] = [one.id for one in client.models.list()]
    try:
        jobs.retrieve("job_nothing")
    except openai.NotFoundError as error:
        said["not_found"] = [error.code, error.type, bool(error.request_id)]
    try:
        jobs.create(model=model, training_file="file-abc")
    except openai.UnprocessableEntityError as error:
        said["refused"] = [error.code, error.param]
    try:
        jobs.pause(job.id)
    except openai.ConflictError as error:
        said["conflict"] = error.code
    try:
        openai.OpenAI(base_url=base_url, api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        said["wrong_key"] = error.code
    print(json.dumps(said))


if __name__ == "__main__":
    main()
