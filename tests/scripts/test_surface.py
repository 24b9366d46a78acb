"""What scripts ask of `torch.cuda` besides training, in one script for all of it."""

from __future__ import annotations

from typing import Any

QUERIES = """
import copy, io, pickle
import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.distributed.optim import ZeroRedundancyOptimizer

cuda = torch.cuda
assert cuda.current_stream(device="cuda:0") == cuda.default_stream(device="cuda:0")
with torch.autograd.profiler.profile(enabled=False):  # says nothing of devices
    pass
assert "CUDA" in torch.__config__.show()
cudart = cuda.cudart()
cuda.check_error(cudart.cudaProfilerStart())
assert cudart.cudaMemGetInfo(0)[1] == torch.cuda.get_device_properties(0).total_memory
assert cudart.cudaGetErrorString(2) == "out of memory"
torch.backends.cuda.preferred_linalg_library("magma")
torch.backends.cuda.preferred_linalg_library("cusolver")
torch.backends.cuda.cufft_plan_cache.max_size = 10
assert torch.backends.cuda.cufft_plan_cache[0].max_size == 10 and torch.backends.cuda.cufft_plan_cache.size == 0
assert torch.backends.cudnn.is_available() and torch.backends.cuda.is_flash_attention_available()
half = torch.ones(1, 2, 64, 64, device="cuda", dtype=torch.half)
assert can_use_flash_attention(SDPAParams(half, half, half, None, 0.0, True, False))
assert not can_use_flash_attention(SDPAParams(half.float(), half.float(), half.float(), None, 0.0, True, False))
assert can_use_efficient_attention(SDPAParams(half, half, half, None, 0.0, True, False))
assert cuda.utilization() == 100 and cuda.device_memory_used() > 0
try:
    cuda.temperature()
except NotImplementedError as error:
    print(error)
cuda.tunable.enable(True)
cuda.tunable.set_max_tuning_iterations(7)
assert cuda.tunable.is_enabled() and cuda.tunable.get_max_tuning_iterations() == 7 and cuda.tunable.get_results() == ()

before = torch.accelerator.memory_allocated()
large = torch.ones(2**20, device="cuda")
assert torch.accelerator.memory_allocated() - before == 2**22 == torch.cuda.memory_allocated() - before
assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
torch.accelerator.reset_peak_memory_stats()
torch.accelerator.empty_cache()

stream = cuda.Stream()
assert stream.cuda_stream and cuda.ExternalStream(stream.cuda_stream) == stream and cuda.default_stream().cuda_stream == 0
assert cuda.ExternalStream(12345) == cuda.ExternalStream(12345) != stream
assert cuda.Stream.priority_range() == (0, -5)

copied = pickle.loads(pickle.dumps({"x": large, "p": torch.nn.Parameter(large)}))
assert copied["x"].shape == large.shape and copied["x"].device == large.device and not copied["x"].requires_grad
assert isinstance(copied["p"], torch.nn.Parameter) and copied["p"].requires_grad
assert copy.copy(large).data_ptr() == large.data_ptr() == torch.from_dlpack(large).data_ptr()
views = copy.deepcopy([large[:10], large.view(1024, 1024), large])
assert len({v.untyped_storage().data_ptr() for v in views}) == 1 and views[0].data_ptr() != large.data_ptr()
assert [v.shape for v in views] == [(10,), (1024, 1024), (2**20,)]
del views
trained = torch.nn.Linear(2**10, 2**10, bias=False).cuda()
trained(torch.ones(2, 2**10, device="cuda")).sum().backward()
before = torch.cuda.memory_allocated()
best = copy.deepcopy(trained)
assert best.weight.grad is None and torch.cuda.memory_allocated() - before == 2**22
leaf = torch.ones(4, device="cuda", requires_grad=True)
leaf.sum().backward()
assert copy.deepcopy(leaf).requires_grad and copy.deepcopy(leaf).grad.shape == (4,)
assert copy.deepcopy(torch.arange(9, device="cuda")[2:5]).tolist() == [2, 3, 4]
assert large.share_memory_() is large and large.is_shared()

old = cuda.FloatTensor(3, 4)
assert old.shape == (3, 4) and old.is_cuda and isinstance(old, cuda.FloatTensor) and not isinstance(old, cuda.LongTensor)
assert cuda.LongTensor([1, 2]).tolist() == [1, 2] and cuda.HalfTensor(old.size()).dtype == torch.half
kind = cuda.FloatTensor if cuda.is_available() else torch.FloatTensor
assert torch.randn(4).type(kind).is_cuda and torch.randn(4).type("torch.cuda.HalfTensor").dtype == torch.half
assert old.type() == "torch.cuda.FloatTensor" and old.type(torch.float64).dtype == torch.float64
torch.set_default_tensor_type("torch.cuda.HalfTensor")
assert torch.ones(1).is_cuda and torch.ones(1).dtype == torch.half
torch.set_default_tensor_type(torch.FloatTensor)
assert not torch.ones(1).is_cuda and torch.ones(1).dtype == torch.float32

weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
weight.mine, same = 3, weight
weight.data = weight.data.cpu()
assert weight is same and weight.mine == 3 and weight.device.type == "cpu"

layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    layer(torch.randn(16, 8, device="cuda")).sum().backward()
    optimizer.step()
print("all asked")
"""
POOL = """
import torch

pool = torch.cuda.MemPool()
layer = torch.nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
outside = torch.zeros(2**20, device="cuda")
reserved = [torch.cuda.memory_reserved()]
for _ in range(2):
    with torch.cuda.use_mem_pool(pool):
        inside = torch.zeros(2**20, device="cuda")
    del inside
    reserved.append(torch.cuda.memory_reserved())
outside_again = torch.zeros(2**20, device="cuda")
reserved.append(torch.cuda.memory_reserved())
print("reserved:", *((b - a) // 2**20 for a, b in zip(reserved, reserved[1:])), "MiB more")
for step in range(3):
    layer(torch.randn(16, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_script_may_ask_whatever_a_gpu_would_answer(run: Any) -> None:
    """Queries of the runtime, of libraries, memory, streams and types answer as on a machine with a GPU."""
    done = run(QUERIES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the simulated GPU has no temperature" in done.stdout and "all asked" in done.stdout


def test_memory_of_a_pool_is_its_own(run: Any) -> None:
    """A tensor of 4 MiB in a pool needs a segment of 20 MiB of its own, though 12 MiB of another are free, and only once."""
    done = run(POOL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reserved: 20 0 0 MiB more" in done.stdout
