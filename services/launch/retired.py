"""Variables that earlier releases read and this one does not. Told by ``gspo up`` and ``gspo doctor``.

Compose refuses them itself: docker-compose.yml.
"""

from __future__ import annotations

from collections.abc import Mapping

RETIRED = {
    "TRAINER_GPUS": "TRAINER_DEVICES=0,1 names the GPUs of compose's trainer, --gpus those of gspo",
    "SGLANG_GPUS": "SGLANG_DEVICES=2,3 names the GPUs of compose's SGLang, --gpus those of gspo",
}


def retired_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are set, each with what to say instead."""
    return {name: instead for name, instead in RETIRED.items() if environment.get(name)}
