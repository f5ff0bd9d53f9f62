"""The chat codec of a job's model, for reading recorded token ids.

One rule: unreadable text is shown as ids; a model whose files are missing hides no episode. No model is loaded and no
code of one is run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from pydantic import ValidationError

from gspo_core.log.transcript import TranscriptCodec
from gspo_core.spec import JobSpec
from services.files.job_dir import JobsDir
from services.files.weights import WeightStore
from services.state.jobs import JobRecord

MAX_CODECS = 8


class Codecs:
    """Blocking: call it in a thread."""

    def __init__(self, jobs_dir: JobsDir) -> None:
        self._jobs_dir = jobs_dir
        self._held: OrderedDict[str, TranscriptCodec] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job: JobRecord) -> tuple[TranscriptCodec | None, str | None]:
        """The codec, or the reason why there is none."""
        with self._lock:
            if job.id in self._held:
                self._held.move_to_end(job.id)
                return self._held[job.id], None
        try:
            codec = self._load(job)
        except (OSError, ValueError) as error:
            return None, f"text cannot be shown, only token ids are: {error}"
        with self._lock:
            self._held[job.id] = codec
            while len(self._held) > MAX_CODECS:
                self._held.popitem(last=False)
        return codec, None

    def _load(self, job: JobRecord) -> TranscriptCodec:
        try:
            spec = JobSpec.model_validate(job.spec_data)
        except ValidationError as error:
            raise ValueError(f"the job's specification comes from another release: {error}") from None
        # Formats, templates and tokenizers load with the first episode that is shown; most API processes show none.
        from gspo_core.chat import load_codec

        chat = spec.chat
        # A version's directory holds the tokenizer that sampled, even if the model's files have changed since.
        return load_codec(
            WeightStore(self._jobs_dir.job(job.id)).newest_tokenizer() or Path(spec.model),
            format=chat.format,
            calls=chat.calls,
            thinking=chat.thinking,
            variables=chat.variables,
        )
