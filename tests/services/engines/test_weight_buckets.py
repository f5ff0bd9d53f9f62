"""Buckets hold the bits of the files, in an order that both ends read alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.engines.weight_buckets import NoBuckets, buckets_in, unpack


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5).bfloat16(),
        "wide": torch.randn(7),
        "single": torch.randn(1).bfloat16(),
        "big": torch.randn(40, 10).bfloat16(),
        "deep": torch.randn(2, 3, 4),
    }


@pytest.mark.parametrize("max_bytes", [1, 64, 2**20])
def test_all_bits_of_all_files_come_back(tmp_path: Path, tensors: dict[str, torch.Tensor], max_bytes: int) -> None:
    first = {name: tensors[name] for name in ("odd", "wide")}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in first}, tmp_path / "model-00002.safetensors")
    buckets = buckets_in(tmp_path, max_bytes)
    found = {name: one for bucket in buckets for name, one in unpack(bucket.tensors, bucket.data.clone()).items()}
    assert found.keys() == tensors.keys()
    for name, one in tensors.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one)


def test_a_bucket_is_as_large_as_it_may_be_and_holds_one_type(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    buckets = buckets_in(tmp_path, 100)
    kinds = [{dtype for _, dtype, _ in bucket.tensors} for bucket in buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert [bucket.data.numel() for bucket in buckets if len(bucket.tensors) > 1] == [30 + 2]
    assert sum(bucket.data.numel() for bucket in buckets) == sum(one.nbytes for one in tensors.values())
    assert len(buckets_in(tmp_path)) == 2, "one for each type"


def test_what_no_group_takes_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"scale": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(NoBuckets, match=r"scale in model\.safetensors has type F8_E4M3"):
        buckets_in(tmp_path)
