"""Ten fixed pieces of work whose CPU time `benchmarks.guard` compares between two trees.

Rule: this file is run by its path with another tree first on the path of imports, so it uses only what is public and
old, and imports inside of each piece: what a tree does not have is told for that piece alone. A piece never
changes; another question is another piece.

It reads a name a line and answers each with a line of JSON: the CPU seconds of this process,
or why the piece cannot run here.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Work = Callable[[], Any]
FOLDER = tempfile.TemporaryDirectory()
ROOT = Path(FOLDER.name)
NUM_TOKENS = 8192
VOCABULARY = 2000


def arrays(num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return {
        "token_ids": generator.integers(0, 150_000, num_tokens).astype(np.int32),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -generator.exponential(size=num_tokens), 0).astype(np.float32),
    }


def segment(group: int = 0, member: int = 0, num_tokens: int = NUM_TOKENS, reward: float | None = None) -> Any:
    from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason

    outcome = None if reward is None else Outcome(StopReason.COMPLETED, reward)
    return Segment(
        key=EpisodeKey("job-1", group, member),
        attempt=0,
        branch=0,
        index=0,
        turn=0,
        version=1,
        temperature=1.0,
        engine_id="engine-0",
        outcome=outcome,
        **arrays(num_tokens),
    )


def groups() -> list[Any]:
    from gspo_core.types import Group, Split, Trajectory

    return [
        Group(
            "job-1",
            group,
            Split.TRAIN,
            0,
            8,
            tuple(Trajectory((segment(group, member, 512, float(member % 3)),)) for member in range(8)),
        )
        for group in range(4)
    ]


def small_model() -> Path:
    directory = ROOT / "model"
    if not directory.exists():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
        Qwen3ForCausalLM(config).save_pretrained(directory)
        from benchmarks.rollout_stage import write_model

        write_model(ROOT / "spoken")
        (directory / "tokenizer.json").write_bytes((ROOT / "spoken" / "tokenizer.json").read_bytes())
    return directory


def codec() -> Work:
    from gspo_core.codec import decode, encode

    one = segment()
    return lambda: decode(encode(one))


def read_a_batch() -> Work:
    from gspo_core.log.batches import decode_batch, encode_batch
    from gspo_core.position import Position

    extra: Any = {"version": 1, "num_dispatched": 4, "dropped": {}, "staleness": {"1": 0}}
    data = b"".join(encode_batch(Position(1, 1), groups(), extra))
    return lambda: decode_batch(data)


def append_a_segment() -> Work:
    from gspo_core.codec import encode
    from gspo_core.types import Split
    from services.state.queue import Append, Bus
    from services.state.server import RedisServer, connect
    from services.state.store import Store

    server = RedisServer.spawn(ROOT / "redis").__enter__()
    loop = asyncio.new_event_loop()
    redis = connect(server.url)
    bus, store, payload = Bus(redis), Store(redis), encode(segment(num_tokens=2048))

    async def begin() -> tuple[str, str, Any]:
        await store.load_functions()
        await store.jobs.create("{}")
        claim = await store.jobs.claim("guard")
        assert claim is not None
        await bus.dispatch(claim.job_id, claim.token, 0, size=8, split=Split.TRAIN, task_index=0)
        token = await bus.join("worker")
        (lease,) = await bus.lease(claim.job_id, "worker", token, 1)
        return claim.job_id, token, lease

    job, token, lease = loop.run_until_complete(begin())
    index = iter(range(10**9))
    return lambda: loop.run_until_complete(
        bus.append(job, token, [Append(lease.key, 0, next(index), payload, final=False, version=1)])
    )


def render_a_chat() -> Work:
    from benchmarks.rollout_stage import write_model

    codec = write_model(ROOT / "chat")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(40):
        messages += [
            {"role": "user", "content": f"What is {number} and one more? " * 5},
            {"role": "assistant", "content": f"That is {number + 1}. " * 5},
        ]
    return lambda: codec.render(messages)


def gspo_loss() -> Work:
    import torch

    from gspo_core.objective import ObjectiveConfig, policy_loss

    generator = torch.Generator().manual_seed(0)
    shape = (16, 512)
    policy, behavior = (-torch.rand(shape, generator=generator) for _ in range(2))
    mask, advantages = torch.ones(shape), torch.randn(16, generator=generator)
    config = ObjectiveConfig()

    def run() -> None:
        values = policy.clone().requires_grad_()
        loss: Any = policy_loss(config, values, mask, advantages, behavior, behavior)[0]
        loss.backward()

    return run


def train_a_step() -> Work:
    from gspo_core.batch import TrainSequence
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    generator, sequences = np.random.default_rng(0), []
    for number in range(8):
        acts = np.arange(128) >= 32
        zeros: Any = np.zeros(128)
        ids = generator.integers(0, VOCABULARY, 128).astype(np.int32)
        sequences.append(TrainSequence(ids, acts, zeros, zeros, zeros, float(number - 3.5)))
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-6))
    objective = ObjectiveConfig(minibatches=1, correction="none", k3_gate=None, outlier_gate=None, off_policy_gate=None)
    learner = Learner(small_model(), config, objective, seed=0, device="cpu")
    return lambda: learner.step(sequences)


def sample_tokens() -> Work:
    import torch

    from services.engine.model import Decoder
    from services.engine.scheduler import GenerateRequest, Scheduler

    decoder = Decoder(small_model(), device=torch.device("cpu"), dtype=torch.float32, context_length=None)
    scheduler = Scheduler(decoder, max_concurrency=16, prefix_cache_bytes=0)
    loop, generator, numbers = asyncio.new_event_loop(), random.Random(0), iter(range(10**9))

    def run() -> None:
        for _ in range(16):
            name = str(next(numbers))
            prompt = [generator.randrange(VOCABULARY) for _ in range(64)]
            scheduler.submit(GenerateRequest(name, prompt, 16, 1.0, frozenset(), 7, None, loop.create_future()))
        while scheduler.has_work:
            scheduler.step()

    return run


def turn_at_8000_tokens() -> Work:
    from gspo_core.types import EpisodeKey
    from services.episodes.policy import Sampled, Span
    from services.episodes.tree import Ledger

    ids = [100_000 + number for number in range(128)]
    sampled = Sampled(ids, [-1.0] * 128, (Span(0, 128, 1),), "engine")

    def run() -> None:
        ledger = Ledger(EpisodeKey("job", 0, 0), 0, 1.0)
        ledger.observe(ids * 62)
        for _ in range(8):
            ledger.prompt().to_json()
            ledger.record(sampled)
            ledger.observe(ids)

    return run


def advantages() -> Work:
    from gspo_core.advantage import advantages_of
    from gspo_core.objective_config import AdvantageConfig

    batch, config = groups(), AdvantageConfig()
    return lambda: advantages_of(batch, config)


def digest_of_a_version() -> Work:
    from services.files.job_dir import JobDir
    from services.files.weights import WeightStore

    store = WeightStore(JobDir(ROOT / "job-1"))

    def save(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(bytes(16 << 20))

    manifest = store.write(1, 1, 0, save)
    return lambda: store.verify(manifest)


WORK: dict[str, tuple[Callable[[], Work], int]] = {
    "append a segment of 2,048 tokens": (append_a_segment, 100),
    "read a batch of 32 episodes": (read_a_batch, 20),
    "encode and decode a segment of 8,192 tokens": (codec, 1000),
    "render a chat of 81 messages": (render_a_chat, 20),
    "GSPO's loss and its gradient, 16 x 512": (gspo_loss, 50),
    "a learner's step on 8 x 128 tokens": (train_a_step, 3),
    "sample 16 x 16 tokens": (sample_tokens, 3),
    "eight turns at 8,000 tokens of context": (turn_at_8000_tokens, 30),
    "advantages of a batch": (advantages, 200),
    "check a published version of 16 MiB": (digest_of_a_version, 5),
}


def main() -> None:
    ready: dict[str, Work] = {}
    for line in sys.stdin:
        name = line.strip()
        make, number = WORK[name]
        try:
            if name not in ready:
                ready[name] = make()
                ready[name]()
            work, began = ready[name], time.process_time()
            for _ in range(number):
                work()
            answer: dict[str, Any] = {"cpu_s": (time.process_time() - began) / number}
        except Exception as error:  # an older tree may lack anything; it is told, not passed over
            answer = {"problem": f"{type(error).__name__}: {error}"[:200]}
        print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
