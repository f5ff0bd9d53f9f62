"""The label of an engine's weights names a job, an epoch and a version, or it is no label."""

from __future__ import annotations

import pytest

from gspo_core.versions import EngineLabel, NotALabel, WeightFile, WeightsManifest


def test_the_label_of_a_manifest_is_read_back() -> None:
    manifest = WeightsManifest("job_a", 7, 2, 5, (WeightFile("m", 1, "0" * 64),))
    assert manifest.label == "job_a/2/7"
    assert EngineLabel.parse(manifest.label) == EngineLabel("job_a", epoch=2, version=7)


@pytest.mark.parametrize("text", ["", "default", "job", "job/1", "job/1/", "/1/2", "job/x/2", "job/1/-2", "job/1/2/3"])
def test_anything_else_is_no_label(text: str) -> None:
    with pytest.raises(NotALabel, match="JOB/EPOCH/VERSION"):
        EngineLabel.parse(text)
    assert EngineLabel.parse_or_none(text) is None
