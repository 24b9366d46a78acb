"""Fits how much GPUs of one type differ in speed (`autosac.estimator.network.chance.SPREAD`) to published throughput.

    python -m benchmarks.fit_spread

The same job (model, batch of a rank, accumulation, checkpointing) on more and more GPUs, sharded over all of them, from
MosaicML's tables (llm-foundry, Apache-2.0, scripts/train/benchmarking/README.md): tokens per second and GPU. Every GPU waits
for the slowest in every layer; if speeds are normal with the standard deviation s, more GPUs lose s times what the mean of the
largest of n values grows by. s is the least-squares slope through the origin. Each job is also predicted from the others.
What TorchTitan lost from 8 to 128 GPUs (2.5 %, Llama-3.1-8B in bf16) is not used: it is predicted.
"""

from __future__ import annotations

import itertools
import math

from autosac.estimator.network.chance import largest_normal

# job: {GPUs: tokens per second and GPU}
PUBLISHED = {
    "13B, 2 x 2048, H100": {8: 4792, 16: 4767, 32: 4811, 64: 4800},
    "7B, 6 x 2048, H100": {8: 10643, 128: 10475},
    "3B, 6 x 2048 x 3, H100": {32: 23021, 64: 22525},
    "1B, 20 x 2048, H100": {16: 46037, 32: 45130, 64: 44402},
    "760M, 24 x 2048, H100": {16: 68551, 32: 67971},
    "13B, 16 x 2048, A100-40": {64: 1976, 128: 1972},
    "7B, 18 x 2048, A100-40": {32: 3725, 64: 3665, 128: 3623},
}
TORCHTITAN = (8, 128, 0.025)

Pair = tuple[float, float]


def pairs(job: dict[int, int]) -> list[Pair]:
    """(growth of the mean of the largest value, loss of throughput) for each step to more GPUs."""
    return [
        (largest_normal(more) - largest_normal(few), math.log(job[few] / job[more]))
        for few, more in itertools.pairwise(sorted(job))
    ]


def fit(found: list[Pair]) -> float:
    """The slope through the origin."""
    return sum(x * y for x, y in found) / sum(x * x for x, _ in found)


def main() -> None:
    """Print the fit, and each job as predicted from the others."""
    everything = [pair for job in PUBLISHED.values() for pair in pairs(job)]
    print(f"spread: {fit(everything):.2%} from {len(everything)} pairs of {len(PUBLISHED)} jobs")
    errors, without = [], []
    for name, job in PUBLISHED.items():
        others = fit([pair for other, values in PUBLISHED.items() if other != name for pair in pairs(values)])
        few, more = min(job), max(job)
        lost = math.log(job[few] / job[more])
        expected = others * (largest_normal(more) - largest_normal(few))
        errors.append(abs(expected - lost))
        without.append(abs(lost))
        print(f"{name:24} {few:3} to {more:3} GPUs: lost {lost:+.1%}, predicted from the others {expected:+.1%}")
    few, more, lost = TORCHTITAN
    expected = fit(everything) * (largest_normal(more) - largest_normal(few))
    print(f"mean error {sum(errors) / len(errors):.1%}; if nothing were lost {sum(without) / len(without):.1%}")
    print(f"{'TorchTitan, 8B':24} {few:3} to {more:3} GPUs: lost {lost:+.1%}, predicted {expected:+.1%} (not used)")


if __name__ == "__main__":
    main()
