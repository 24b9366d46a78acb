"""Small spaces taken at random, in which every layout is worked out: is the best that a search finds the best of all?

A number gives a space: a small model of TorchTitan, GPUs of a kind, and for every knob one or two values, so that there are a
few layouts. All are worked out within most of the GPU, and within what few of them fit as they are. `benchmarks.search.checks`
compares every bound with what it bounds, and the search's best with the best of all.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosac.configurations.running.search import TitanSearch
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.request import SearchRequest
from autosac.errors import CaptureError, UsageError
from autosac.files.temporary import temporary_folder
from benchmarks.search.checks import check_bounds

MODELS = (
    ("llama3", "debugmodel"),
    ("qwen3", "debugmodel"),
    ("qwen3", "debugmodel_moe"),
    ("deepseek_v3", "debugmodel"),
    ("llama4", "debugmodel"),
)
GPUS = ("h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s", "rtx-4090", "mi300x")
KNOBS: Mapping[str, tuple[Any, ...]] = {  # the usual value first
    "data_parallel_replicate": (1, 2),
    "tensor_parallel": (1, 2),
    "context_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "pipeline_schedule": ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    "stages_per_rank": (2, 3),
    "pipeline_split": ("torchtitan", "balanced"),
    "expert_parallel": (1, 2, 4),
    "microbatch": (4, 2, 8),
    "reshard_after_forward": ("always", "never"),
    "compile": (False, True),
    "async_tensor_parallel": (False, True),
    "float8": (False, True),
    "optimizer": ("fused", "foreach"),
    "cpu_offload": (False, True),
    "activation_offload": (False, True),
    "chunk_loss": (False, True),
}
_FEWEST, _MOST = 4, 16  # layouts
_SHARE = 0.8  # of the peak of the layout in the middle
_ALL = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SmallSpace:
    """A job, as the text of its file, and where and how it is searched."""

    job: str
    offer: Offer
    space: Mapping[str, Any]

    def request(self, folder: Path, budget: str | float) -> SearchRequest:
        """The search, for the exact best; its files are in the folder."""
        path = folder / "job.toml"
        path.write_text(self.job)
        return SearchRequest(
            job=str(path), offers=(self.offer,), space=self.space, budget=budget, global_batch=32, gap=0.0, workers=1
        )


def small_space(number: int) -> SmallSpace:
    """The space with this number: the first of those that chance proposes that has neither too few layouts nor too many."""
    chance = random.Random(number)
    while True:
        model, flavor = chance.choice(MODELS)
        job = f'[model]\nname = "{model}"\nflavor = "{flavor}"\n\n[training]\nlocal_batch_size = 8\nseq_len = 1024\n'
        space: dict[str, Any] = {name: values[:1] for name, values in KNOBS.items()}
        for name in chance.sample(sorted(KNOBS), 5):
            space[name] = tuple(chance.sample(KNOBS[name], 2))
        found = SmallSpace(
            job=job, offer=Offer(gpu=chance.choice(GPUS), world_size=chance.choice((2, 4, 8))), space=space
        )
        if _FEWEST <= _layouts(found) <= _MOST:
            return found


def _layouts(space: SmallSpace) -> int:
    with temporary_folder() as folder:
        try:
            with searching(replace(space.request(folder, "85%"), workers=0)) as search:
                return len(search.layouts)
        except UsageError:  # nothing is legal
            return 0


def check_small(numbers: Iterable[int]) -> int:
    """Work out every layout of these spaces, twice; how many bounds were wrong, and searches that did not find the best.

    A space of which nothing can run is passed over, with the reason.
    """
    wrong = 0
    for number in numbers:
        space = small_space(number)
        print(f"space {number}: {space.offer.world_size} x {space.offer.gpu}", flush=True)
        try:
            wrong += _check(number, space)
        except CaptureError as e:
            print(f"space {number} cannot run: {e}", flush=True)
    return wrong


def _check(number: int, space: SmallSpace) -> int:
    with temporary_folder() as folder:
        request = space.request(folder, "85%")
        wrong = check_bounds(request, _ALL, 0)
        with searching(request) as search:
            budget = tight_budget(_peaks(search))
        print(f"space {number} within {budget} bytes", flush=True)
        return wrong + check_bounds(replace(request, budget=budget), _ALL, 0)


def tight_budget(peaks: Iterable[int]) -> int:
    """Within which few of the layouts fit as they are, by their peaks; those that cannot run (0) do not count."""
    return int(_SHARE * statistics.median([peak for peak in peaks if peak] or [0]))


def _peaks(search: TitanSearch) -> list[int]:
    """Of every layout without checkpointing, 0 where it cannot run."""
    found = []
    for layout in search.layouts:
        task = replace(search.task(layout, 0.0), checkpointing=("none",))
        rows = search.workers.submit(task).result().get("rows", [])
        found.append(max((row["peak_reserved_bytes"] for row in rows), default=0))
    return found
