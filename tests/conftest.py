"""For all tests: captures are made, not taken from what the user's earlier runs have left."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shared_captures import Pool

    from autosac.capture.process.server import CaptureServer

gc.disable()  # until the tests are collected: importing makes no garbage
os.environ["AUTOSAC_CACHE"] = "off"
# No test downloads anything. Before anything imports the hub's package, which reads it once: it would try for a minute.
os.environ["HF_HUB_OFFLINE"] = "1"
# Workers share the processors. Before anything imports numpy or PyTorch: threads that wait for each other take three quarters
# of the time of small products.
os.environ.setdefault("OMP_NUM_THREADS", "1")
with contextlib.suppress(ImportError):  # the environment of TorchTitan 0.3 has no hypothesis, and needs none
    from hypothesis import settings

    # On a busy machine an example may take any time: what is slow is not wrong.
    settings.register_profile("autosac", deadline=None)
    settings.load_profile("autosac")

# Folders and files whose tests are marked; `make test-fast` runs the others (see tests/README.md).
CAPTURE = (
    "bench",
    "benchmarks",
    "capture",
    "configurations/test_search.py",
    "derivation",
    "docs/test_examples.py",
    "end_to_end",
    "estimator/calibration/test_calibrate.py",
    "estimator/calibration/test_calls.py",
    "fuzz",
    "integrations",
    "invariants",
    "planning/test_expert_load.py",
    "planning/test_offloading.py",
    "scripts",
    "titan03",
)
# Files in these folders that capture nothing.
WITHOUT_CAPTURES = (
    "bench/test_models.py",
    "bench/test_results.py",
    "bench/test_suite.py",
    "benchmarks/test_matrix.py",
    "benchmarks/test_small_spaces.py",
    "benchmarks/test_step_kinds.py",
    "capture/test_device_facts.py",
    "capture/test_dispatch_cache.py",
    "capture/test_exchanged_values.py",
    "capture/test_imports.py",
    "capture/test_job_requests.py",
    "capture/test_layering.py",
    "capture/test_log.py",
    "capture/test_masks.py",
    "capture/test_programs.py",
    "capture/test_recipes.py",
    "capture/test_recurrent_shapes.py",
    "capture/test_routing.py",
    "capture/test_shapes.py",
    "capture/test_signatures.py",
    "capture/test_speedups.py",
    "capture/test_storages.py",
    "capture/test_trace.py",
    "capture/test_unwritten.py",
    "capture/test_worker.py",
    "derivation/test_agreement.py",
    "derivation/test_mix.py",
    "derivation/test_templates.py",
    "integrations/test_agreement.py",
    "integrations/test_compiled_parts.py",
    "integrations/test_eager.py",
    "integrations/test_effects.py",
    "integrations/test_first_steps.py",
    "integrations/test_hidden_changes.py",
    "integrations/test_in_place.py",
    "integrations/test_kernels.py",
    "integrations/test_launches.py",
    "integrations/test_memories.py",
    "integrations/test_misfits.py",
    "integrations/test_observe.py",
    "integrations/test_offload.py",
    "integrations/test_tape.py",
    "integrations/test_transforms.py",
    "integrations/test_units.py",
    "integrations/test_witness.py",
    "scripts/test_alike_ranks.py",
    "scripts/test_clock.py",
    "scripts/test_exchange.py",
    "scripts/test_monitors.py",
    "scripts/test_requests.py",
    "scripts/test_step_times.py",
    "scripts/test_synthetic_data.py",
)
SLOW = (
    "bad_input/test_generator.py",
    "bad_input/test_jobs.py",
    "bench/test_results.py",
    "benchmarks/test_step_kinds.py",
    "capture/test_dispatch_cache.py",
    "capture/test_recipes.py",
    "capture/test_storages.py",
    "configurations/test_study.py",
    "estimator/calibration/test_models.py",
    "estimator/calibration/test_pinned.py",
    "golden",
    "integrations/test_compiled_parts.py",
    "integrations/test_eager.py",
    "integrations/test_effects.py",
    "integrations/test_first_steps.py",
    "integrations/test_misfits.py",
    "integrations/test_offload.py",
    "integrations/test_tape.py",
    "planning/test_local_search.py",
    "solvers/test_closure.py",
)
# Whole jobs, planned, searched or trained: `make test-long` runs these, `make test` all others.
LONG = (
    "bench/test_run.py",
    "benchmarks/test_compiled_kept.py",
    "benchmarks/test_torchtitan_published.py",
    "capture/test_compiled_steps.py",
    "capture/test_cpu_truth.py",
    "capture/test_handover.py",
    "capture/test_inductor.py",
    "capture/test_layers.py",
    "capture/test_load.py",
    "capture/test_microbatches.py",
    "capture/test_pipeline.py",
    "capture/test_plans_of_solvers.py",
    "capture/test_titan_accumulation.py",
    "capture/test_warming.py",
    "configurations/test_search.py",
    "configurations/test_search_stages.py",
    "derivation/test_baseline_plans.py",
    "derivation/test_deriver.py",
    "docs/test_examples.py",
    "end_to_end/test_batch_size.py",
    "end_to_end/test_collectives.py",
    "end_to_end/test_confidence.py",
    "end_to_end/test_plan.py",
    "end_to_end/test_plans.py",
    "estimator/calibration/test_calibrate.py",
    "fuzz",
    "integrations/test_torchtitan.py",
    "invariants",
    "planning/test_offloading.py",
    "planning/test_pipeline_plans.py",
    "scripts/test_accumulated.py",
    "scripts/test_applied.py",
    "scripts/test_compiled.py",
    "scripts/test_ddp_hooks.py",
    "scripts/test_faults.py",
    "scripts/test_frameworks.py",
    "scripts/test_loops.py",
    "scripts/test_plain.py",
    "scripts/test_ranks.py",
)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes that are no plain words get a name without them: gzip's hold the time of day, and workers must agree."""
    if isinstance(val, bytes) and not (val.isascii() and len(val) <= 40):
        return "bytes"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers get whole groups of tests, unless ``--dist`` says otherwise."""
    if config.getvalue("dist") != "load":
        return None
    from sharing_out import ByGroup

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole folders and files as `capture`, `slow` or `long`. Among workers, what takes longest comes first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from sharing_out import rank

        items.sort(key=lambda item: rank(item.nodeid))
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here)
        places = {path.as_posix(), *(folder.as_posix() for folder in path.parents)}
        if places & set(CAPTURE) and not places & set(WITHOUT_CAPTURES):
            item.add_marker("capture")
        for marker, files in (("slow", SLOW), ("long", LONG)):
            if places & set(files):
                item.add_marker(marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Plans of compiled modules need a PyTorch that tells policies what operators return, budgets of modules a newer one."""
    if item.get_closest_marker("compiled_plan"):
        from autosac.integrations.recompute.compiled_modes import NEEDS, SEES_RESULTS

        if not SEES_RESULTS:
            pytest.skip(NEEDS)
    if item.get_closest_marker("module_budget"):
        import torch

        from autosac.planning.compiled_policies import modules_have_budgets

        if not modules_have_budgets(torch.__version__):
            pytest.skip("memory budgets of modules need PyTorch 2.13")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not go through them again and again. A test that makes a
    million objects needs no thousand collections.
    """
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for captures that commands of several tests share, those of other workers too."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captures"


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    """Capture processes for commands."""
    from shared_captures import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def shared_processes(_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of several tests use the same capture processes."""
    from shared_captures import share

    share(_pool, monkeypatch)


@pytest.fixture(scope="module")
def module_shares_captures(_pool: Pool, shared_cache: Path) -> Iterator[None]:
    """Commands and searches of a whole file use the same capture processes, and what tests have captured."""
    from shared_captures import share

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSAC_CACHE", str(shared_cache))
        share(_pool, patch)
        yield


@pytest.fixture(scope="session")
def capture_server(_pool: Pool, shared_cache: Path) -> CaptureServer:
    """Captures what no test has captured yet, in processes that all tests of a worker share: one takes seconds to start."""
    from shared_captures import SharedServer

    return SharedServer(_pool, cache=shared_cache)


@pytest.fixture(scope="session")
def products() -> Callable[..., Any]:
    """``products(rows=, width=, blocks=)``: the `make_step` of blocks of two products with a ReLU between, and a head.

    A block's first result has rows x 4 width elements and takes long to recompute.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def of(*, rows: int, width: int, blocks: int) -> Callable[[torch.device], Any]:
        def make_step(device: torch.device) -> Any:
            model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, width, bias=False)).to(
                device
            )
            x = torch.randn(rows, width, device=device)

            def step() -> None:
                model(x).sum().backward()

            return model, step

        return make_step

    return of
