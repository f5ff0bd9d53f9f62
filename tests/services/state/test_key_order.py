"""Functions know their keys by position, and processes of release 0.2.0 send the keys that it had."""

from __future__ import annotations

import pytest

from services.state.keys import BUS_KEYS, JOB_KEYS, SERVICE_KEYS

OF_0_2_0 = {
    BUS_KEYS: "trainer meta counters queue episodes groups index segments ready held holders dead_letters snapshots",
    JOB_KEYS: "job trainer versions events event_log event_nonces metrics metric_steps environments counters groups "
    "queue episodes index segments ready held holders meta snapshots",
    SERVICE_KEYS: "jobs open_jobs idempotency idempotency_order rebuild signs engines engine_beats engine_signs "
    "engine_bindings engine_drains engine_states trainers trainer_beats trainer_signs workers worker_beats "
    "worker_signs lease_tokens lease_beats replies replies_order replies_held",
}


@pytest.mark.parametrize(("names", "before"), OF_0_2_0.items(), ids=["bus", "job", "service"])
def test_new_keys_follow_those_of_the_last_release(names: tuple[str, ...], before: str) -> None:
    assert list(names[: len(before.split())]) == before.split()
