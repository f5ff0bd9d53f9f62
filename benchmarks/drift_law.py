"""What a clip does that compares with the sampler, and what it does when it compares with the proximal policy.

Question: episodes are sampled by a policy that differs from the trainer's by some KL divergence per token (numerics of
the engine, or staleness). Nothing has been learned yet. Which share of them does the clip remove?

Method: contexts are independent, each a distribution over 64 symbols with logits N(0, 3); the trainer's logits are the
sampler's plus Gaussian noise, scaled until the divergence is the wanted one. Tokens are drawn from the sampler and cut
into sequences; every decision is that of `gspo_core.objective.policy_loss`, once with advantage +1 and once with -1.

    python benchmarks/drift_law.py        # one to two minutes on a free core; writes results/drift_law.{json,png}
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.objective import LossStats, ObjectiveConfig, loss_metrics, policy_loss

RESULTS = Path(__file__).parent / "results"
NUM_SYMBOLS = 64
LOGIT_SCALE = 3.0
TOKENS_AT_ONCE = 20_000
LENGTHS = (128, 1024, 8192)
DIVERGENCES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)

GATES_OFF = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}
CONFIGS = {
    "behavior": ObjectiveConfig(anchor="behavior", compensate=False, **GATES_OFF),
    "compensated": ObjectiveConfig(anchor="behavior", **GATES_OFF),
    "proximal": ObjectiveConfig(**GATES_OFF),
}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One point of the plot. Clip fractions are of sequences."""

    kl: float
    """Realised divergence per token from the sampler to the trainer."""
    length: int
    config: str
    num_sequences: int
    clipped_negative: float
    clipped_positive: float
    law_negative: float | None
    """What the law says of the plain clip on the sampler; of the others it says nothing."""
    law_positive: float | None
    mean_log_ratio: float
    std_log_ratio: float
    ess_token: float


def clip_law(kl: float, length: int, low: float, high: float) -> tuple[float, float]:
    """Share of sequences with a negative and with a positive advantage that a clip on the sampler removes.

    log s is normal with mean -kl and variance 2 kl / length.
    """
    deviation = math.sqrt(2 * kl / length)
    normal = NormalDist()
    negative = normal.cdf((kl + math.log1p(-low)) / deviation)
    positive = normal.cdf(-(kl + math.log1p(high)) / deviation)
    return negative, positive


def simulate(kl: float, num_tokens: int, rng: np.random.Generator) -> tuple[Floats, Floats, float]:
    """Log-probs of sampled tokens under the trainer and under the sampler, and the realised divergence per token."""
    scale = _noise_scale(kl, rng)
    policy, behavior, divergences = [], [], []
    for start in range(0, num_tokens, TOKENS_AT_ONCE):
        count = min(TOKENS_AT_ONCE, num_tokens - start)
        sampler, trainer = _tables(count, scale, rng)
        gumbel = -np.log(rng.exponential(size=sampler.shape))
        tokens = np.argmax(sampler + gumbel, axis=1)
        rows = np.arange(count)
        policy.append(trainer[rows, tokens])
        behavior.append(sampler[rows, tokens])
        divergences.append(float((np.exp(sampler) * (sampler - trainer)).sum()))
    return np.concatenate(policy), np.concatenate(behavior), sum(divergences) / num_tokens


def _tables(count: int, scale: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    logits = rng.normal(0, LOGIT_SCALE, (count, NUM_SYMBOLS))
    noise = rng.normal(0, 1, (count, NUM_SYMBOLS))
    return _log_softmax(logits), _log_softmax(logits + scale * noise)


def _log_softmax(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _noise_scale(kl: float, rng: np.random.Generator) -> float:
    """The divergence grows with the square of the noise, as long as both are small."""
    scale = math.sqrt(2 * kl)
    for _ in range(6):
        sampler, trainer = _tables(20_000, scale, rng)
        scale *= math.sqrt(kl / float((np.exp(sampler) * (sampler - trainer)).sum() / len(sampler)))
    return scale


def measure(name: str, policy: Floats, behavior: Floats, kl: float, length: int) -> Row:
    """What the loss does to these tokens, cut into sequences of `length`."""
    config = CONFIGS[name]
    count = len(policy) // length
    policy_BT = torch.from_numpy(policy[: count * length].reshape(count, length))
    behavior_BT = torch.from_numpy(behavior[: count * length].reshape(count, length))
    stats = LossStats.zero()
    rows_at_once = max(1, 32_768 // length)
    for start in range(0, count, rows_at_once):
        rows = slice(start, start + rows_at_once)
        stats = stats + _both_signs(config, policy_BT[rows], behavior_BT[rows])
    metrics = loss_metrics(stats, config)
    law = clip_law(kl, length, config.clip_low, config.clip_high)
    log_ratio_B = (policy_BT - behavior_BT).mean(-1)
    return Row(
        kl=kl,
        length=length,
        config=name,
        num_sequences=count,
        clipped_negative=metrics["gspo/clip_frac_sequence_negative"],
        clipped_positive=metrics["gspo/clip_frac_sequence_positive"],
        law_negative=law[0] if name == "behavior" else None,
        law_positive=law[1] if name == "behavior" else None,
        mean_log_ratio=float(log_ratio_B.mean()),
        std_log_ratio=float(log_ratio_B.std(unbiased=False)),
        ess_token=metrics["gspo/ess_token"],
    )


def _both_signs(config: ObjectiveConfig, policy_BT: Tensor, behavior_BT: Tensor) -> LossStats:
    """The statistics of these sequences, each once with a negative and once with a positive advantage."""
    count = len(policy_BT)
    policy_BT, behavior_BT = policy_BT.repeat(2, 1), behavior_BT.repeat(2, 1)
    advantages = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat_interleave(count)
    return policy_loss(config, policy_BT, torch.ones_like(policy_BT), advantages, None, behavior_BT)[1]


def run(num_tokens: int, seed: int) -> list[Row]:
    rows = []
    for number, kl in enumerate(DIVERGENCES):
        policy, behavior, realised = simulate(kl, num_tokens, np.random.default_rng([seed, number]))
        for length in LENGTHS:
            rows += [measure(name, policy, behavior, realised, length) for name in CONFIGS]
        for row in rows[-len(CONFIGS) * len(LENGTHS) :]:
            law = "" if row.law_negative is None else f"  (law {row.law_negative:.3f} / {row.law_positive:.3f})"
            print(
                f"KL {row.kl:.2e}  n {row.length:5d}  {row.config:12s}"
                f"  clipped A<0 {row.clipped_negative:.3f}  A>0 {row.clipped_positive:.3f}{law}",
                flush=True,
            )
    return rows


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {
        "behavior": "compared with the sampler",
        "compensated": "compared with the sampler, drift removed",
        "proximal": "compared with the proximal policy (default)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True, constrained_layout=True)
    colors = dict(zip(LENGTHS, ("tab:blue", "tab:orange", "tab:red"), strict=True))
    grid = np.logspace(math.log10(DIVERGENCES[0]), math.log10(DIVERGENCES[-1]), 200)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        config = CONFIGS[name]
        for length, color in colors.items():
            points = [row for row in rows if row.config == name and row.length == length]
            x = [row.kl for row in points]
            axis.plot(x, [row.clipped_negative for row in points], "v", color=color, label=f"A < 0, {length} tokens")
            axis.plot(x, [row.clipped_positive for row in points], "^", color=color, mfc="none", label="A > 0")
            if name == "behavior":
                law = [clip_law(kl, length, config.clip_low, config.clip_high) for kl in grid]
                axis.plot(grid, [negative for negative, _ in law], "-", color=color, lw=1)
                axis.plot(grid, [positive for _, positive in law], "--", color=color, lw=1)
        axis.set(xscale="log", title=title, xlabel="KL divergence per token, sampler to trainer", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of sequences clipped")
    axes[0].legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=1_200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = run(options.num_tokens, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"num_tokens": options.num_tokens, "seed": options.seed, "rows": [asdict(row) for row in rows]}
    (options.out / "drift_law.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(rows, options.out / "drift_law.png")


if __name__ == "__main__":
    main()
