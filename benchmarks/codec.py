"""What a segment of 8,192 tokens costs on the wire: ``python -m benchmarks.codec``.

Every number is the median over single calls, each timed alone; the best call stands beside it, because on a shared
machine the median shows the neighbours too. The codec checks everything that it promises (crc, both sums, every
invariant of a segment); the rows below it only pack and unpack lists, without a check.

Aim: encode and decode under 0.05 ms median each, and under 90 KiB.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from gspo_core.codec import decode, encode
from gspo_core.types import EpisodeKey, Segment

NUM_TOKENS = 8192
RUNS = 3000
AIM_MS, AIM_KIB = 0.05, 90.0


def example() -> dict[str, Any]:
    """The arrays of one long turn: a quarter was observed, the rest sampled."""
    rng = np.random.default_rng(0)
    mask = np.arange(NUM_TOKENS) >= NUM_TOKENS // 4
    return {
        "token_ids": rng.integers(0, 150_000, NUM_TOKENS).astype(np.int32),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.exponential(size=NUM_TOKENS), 0).astype(np.float32),
    }


def build(arrays: dict[str, Any]) -> Segment:
    return Segment(
        key=EpisodeKey("job-1", 12, 3),
        attempt=0,
        branch=0,
        index=4,
        turn=2,
        version=17,
        temperature=1.0,
        engine_id="engine-0",
        **arrays,
    )


def times_ms(call: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median and best time of one call."""
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken), min(taken)


def main() -> None:
    arrays = example()
    segment = build(arrays)
    data = encode(segment)
    lists = {name: array.tolist() for name, array in arrays.items()}
    packed, text = msgspec.msgpack.encode(lists), json.dumps(lists).encode()
    rows: list[tuple[str, int, Callable[[], object], Callable[[], object], int]] = [
        ("codec, everything checked", len(data), lambda: encode(segment), lambda: decode(data), RUNS),
        (
            "msgpack lists, unchecked",
            *(len(packed), lambda: msgspec.msgpack.encode(lists), lambda: msgspec.msgpack.decode(packed), RUNS // 10),
        ),
        ("JSON, unchecked", len(text), lambda: json.dumps(lists), lambda: json.loads(text), RUNS // 30),
    ]
    print(f"{NUM_TOKENS} tokens, Python {platform.python_version()}, numpy {np.__version__}, one thread\n")
    print("| encoding | KiB | encode ms (best) | decode ms (best) |\n|---|---|---|---|")
    results = []
    for name, size, encoded, decoded, runs in rows:
        encode_ms, decode_ms = times_ms(encoded, runs), times_ms(decoded, runs)
        results.append((size / 1024, encode_ms[0], decode_ms[0]))
        print(f"| {name} | {size / 1024:.1f} | {show(encode_ms)} | {show(decode_ms)} |")
    for array in arrays.values():
        array.flags.writeable = False
    print(f"\nbuilding the segment from read-only arrays: {show(times_ms(lambda: build(arrays), RUNS))} ms")
    kib, encode_ms_, decode_ms_ = results[0]
    met = kib < AIM_KIB and max(encode_ms_, decode_ms_) < AIM_MS
    print(f"aim: under {AIM_MS} ms each and under {AIM_KIB:.0f} KiB: {'met' if met else 'NOT met on this machine now'}")


def show(times: tuple[float, float]) -> str:
    return f"{times[0]:.4f} ({times[1]:.4f})"


if __name__ == "__main__":
    main()
