"""A weights manifest in its two spellings: the file beside the weights, and the row of the version table.

The rule: both are written once per version and compared as they stand, so their bytes never change.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from gspo_core.versions import WeightFile, WeightsManifest

FORMAT = 1


def encode_manifest(manifest: WeightsManifest) -> bytes:
    """The file that lies beside the weights."""
    record = {
        "format": FORMAT,
        "job": manifest.job,
        "version": manifest.version,
        "epoch": manifest.epoch,
        "step": manifest.step,
        "files": [{"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in manifest.files],
    }
    return (json.dumps(record, indent=1) + "\n").encode()


def decode_manifest(data: bytes) -> WeightsManifest:
    """Raises ValueError, KeyError or TypeError where ``data`` is no manifest of this format."""
    record = json.loads(data)
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']}, this release reads {FORMAT}")
    return WeightsManifest(
        job=record["job"],
        version=record["version"],
        epoch=record["epoch"],
        step=record["step"],
        files=tuple(WeightFile(file["path"], file["size_bytes"], file["sha256"]) for file in record["files"]),
    )


def encode_row(manifest: WeightsManifest) -> str:
    """The row of the version table."""
    return json.dumps(asdict(manifest), sort_keys=True, separators=(",", ":"))


def decode_row(text: bytes | str) -> WeightsManifest:
    data = json.loads(text)
    return WeightsManifest(**{**data, "files": tuple(WeightFile(**file) for file in data["files"])})
