"""The losses that a script prints: they look like those of an untrained model, whatever it computes from them."""

from __future__ import annotations

import ast
from typing import Any

TRAINS = """
import torch, torch.distributed as dist
import torch.nn.functional as F
dist.init_process_group("nccl")
model = torch.nn.Linear(64, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = torch.arange(80, device="cuda")
for step in range(2):
    x = torch.empty(80, 64, device="cuda")
    logits = model(x)
    loss = F.cross_entropy(logits, labels) / 40
    loss.backward()
    total = torch.zeros(1, device="cuda")
    for _ in range(2):
        total += loss.detach() * 40
    mean, summed, tokens, read = (loss * 40).detach(), loss.detach() * 40, torch.tensor([7], device="cuda"), torch.tensor([7])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    for tensor in (summed, tokens, read):
        dist.all_reduce(tensor)
    likelihood = torch.gather(logits.log_softmax(-1), 1, labels[:, None]).squeeze(-1)
    soft = torch.full((80, 1000), 1e-4, device="cuda").scatter_(1, labels[:, None], 0.9001)
    mixed = 0.3 * soft + 0.7 * soft.flip(0)
    margin = likelihood[:40] - likelihood[40:]
    shared = (logits[:, :500] - logits.max(-1, keepdim=True)[0]).exp().sum(-1)
    dist.all_reduce(shared)
    found = (
        loss * 40,
        total,
        F.cross_entropy(logits, labels, reduction="sum") / 80,
        F.cross_entropy(logits, labels, reduction="none")[3],
        F.cross_entropy(logits, labels, label_smoothing=0.1),
        -likelihood.mean(),
        mean,
        summed,
        torch.exp(loss * 40),
        -F.logsigmoid(margin).mean(),
        F.binary_cross_entropy_with_logits(logits[:, 0], torch.ones(80, device="cuda")),
        torch.sigmoid(logits).mean(),
        logits.norm() / 4 * 4,
        margin.mean(),
        logits.sum() / logits.numel(),
        logits.norm() / logits.norm(),
        (logits.argmax(-1) == labels).float().mean(),
        -(F.one_hot(labels, 1000).float() * logits.log_softmax(-1)).sum(-1).mean(),
        torch.sum(-mixed * logits.log_softmax(-1), -1).mean(),
        (shared.log() - logits[:, 0]).mean(),
    )
    optimizer.step()
    print(*(f"{value.item():.4f}" for value in found), tokens.item(), read.item())
"""


def test_losses_begin_as_those_of_an_untrained_model(run: Any) -> None:
    """A cross entropy is the logarithm of the number of classes, in every way of writing it, with soft labels too, and falls
    with each step; so are logits of two classes. What nothing is known of begins at 10, what is alike differs by 0.01. Ranks
    add up what all of them have: integers, too.
    """
    ended = run(TRAINS, "--nproc", "4", "--rank", "0")
    assert ended.returncode == 0, ended.stderr
    first, second = (line.split() for line in ended.stdout.splitlines()[:2])
    loss = ["6.9078", "13.8155", "6.9078", "6.9078", "6.9078", "6.9078", "6.9078", "27.6310", "1000.0000"]
    assert first == [
        *loss,
        "0.6931",
        "0.6931",
        "0.5000",
        "10.0000",
        "0.0100",
        "10.0000",
        "10.0000",
        "0.0010",
        "6.9078",
        "6.9078",
        "7.6009",
        "28",
        "28",
    ]
    assert second[:2] == ["6.4452", "12.8903"]
    assert second[8:] == [
        "629.6497",
        "0.6467",
        "0.6467",
        "0.5000",
        "9.3303",
        "0.0093",
        "9.3303",
        "9.3303",
        "0.0010",
        "6.4452",
        "6.4452",
        "7.0919",
        "28",
        "28",
    ]


WRITES = """
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap
N, C = 20000, 50
model = torch.nn.Linear(8, C).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def one(weight, x, label):
    return F.cross_entropy((x @ weight.T)[None], label[None])
def smoothed(logits, labels):
    losses = -F.log_softmax(logits, -1)
    padding = labels[:, None].eq(-100)
    likelihood, total = losses.gather(-1, labels[:, None].clamp(min=0)), losses.sum(-1, keepdim=True)
    likelihood.masked_fill_(padding, 0.0), total.masked_fill_(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * likelihood.sum() / count + 0.1 * total.sum() / (count * losses.shape[-1])
for step in range(2):
    x = torch.randn(N, 8, device="cuda")
    labels = (torch.rand(N, device="cuda") * C).long()
    some = torch.tensor([3, -100, 7, 1], device="cuda")
    logits = model(x)
    each = F.cross_entropy(logits, labels, reduction="none")
    kept = labels != 7
    taken = logits.gather(1, labels[:, None]).squeeze(1)
    likely = logits.softmax(-1).gather(1, labels[:, None])
    found = {
        "masked": (each * kept).sum() / kept.sum(),
        "counted": (each * kept).sum() / kept.sum().item(),
        "known mask": (each[:4] * (some != -100)).sum() / (some != -100).sum(),
        "ignored": F.cross_entropy(logits[:4], some, reduction="sum") / 3,
        "smoothed": smoothed(logits, labels),
        "smoothed, known": smoothed(logits[:4], some),
        "whole one-hot": -(F.one_hot(some.clamp(min=0), C) * logits[:4].log_softmax(-1)).sum(-1).mean(),
        "log of sum": (torch.logsumexp(logits, -1) - taken).mean(),
        "sum of exponentials": (torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1).log() - taken).mean(),
        "vmap": vmap(grad_and_value(one), in_dims=(None, 0, 0))(model.weight.detach(), x[:9], labels[:9])[1].mean(),
        "focal": (-(1 - likely) * torch.log(likely)).mean(),
        "right": (logits.argmax(1) == labels).float().mean(),
        "also right": logits.max(1)[1].eq(labels).sum() / N,
        "number of right": (logits.max(1).indices == labels).sum().item() / N,
        "similar": 1 - F.cosine_similarity(logits[:9], logits[9:18]).mean(),
        "selected": logits[kept].shape[0] - kept.sum().item(),
    }
    each.mean().backward()
    optimizer.step()
    print({name: round(float(value), 3) for name, value in found.items()})
"""


def test_cross_entropies_written_by_hand_and_counts_of_masks(run: Any) -> None:
    """Whatever a script makes a cross entropy of. A mask counts what it selects; the best of C classes is right once in C."""
    ended = run(WRITES)
    assert ended.returncode == 0, ended.stderr
    first, second = (ast.literal_eval(line) for line in ended.stdout.splitlines()[:2])
    losses = [
        "masked",
        "counted",
        "ignored",
        "vmap",
        "known mask",
        "smoothed",
        "smoothed, known",
        "whole one-hot",
        "log of sum",
        "sum of exponentials",
    ]
    assert {name: first[name] for name in losses} == dict.fromkeys(losses, 3.912)
    assert {name: second[name] for name in losses} == dict.fromkeys(losses, 3.65)
    assert first["focal"] == 3.834  # 49/50 of it
    assert [first[name] for name in ("right", "also right", "number of right")] == [0.02] * 3
    assert [first["similar"], first["selected"]] == [1.0, 0]


DIVERGES = """
import torch
import torch.nn.functional as F
student, teacher = torch.nn.Linear(8, 50).cuda(), torch.nn.Linear(8, 50).cuda()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(40, 8, device="cuda")
    a, b = student(x), teacher(x).detach()
    shares = b.softmax(-1)
    found = {
        **{kind: F.kl_div(a.log_softmax(-1), shares, reduction=kind) for kind in ("batchmean", "sum", "mean")},
        "logarithms": F.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="batchmean", log_target=True),
        "by hand": (shares * (shares.log() - a.log_softmax(-1))).sum(-1).mean(),
    }
    mixed = F.cross_entropy(a, torch.arange(40, device="cuda")) + 0.1 * found["batchmean"]
    mixed.backward()
    optimizer.step()
    print({name: round(value.item(), 3) for name, value in {**found, "mixed": mixed}.items()})
"""


def test_divergences_of_untrained_models(run: Any) -> None:
    """They are small, however many classes they add up, and fall. They add nothing to a cross entropy."""
    ended = run(DIVERGES)
    assert ended.returncode == 0, ended.stderr
    first, second = (ast.literal_eval(line) for line in ended.stdout.splitlines()[:2])
    names = ("batchmean", "sum", "mean", "logarithms", "by hand")
    assert first == {**dict.fromkeys(names, 0.01), "mixed": 3.912}
    assert second == {**dict.fromkeys(names, 0.009), "mixed": 3.65}


MISSES = """
import torch
import torch.nn.functional as F
from torch.distributions import Categorical
N, C = 64, 18
model, other = torch.nn.Linear(8, C).cuda(), torch.nn.Linear(8, C).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.empty(N, 8, device="cuda"), torch.empty(N, C, device="cuda")
    tens = torch.tensor([10.0, -10.0], device="cuda")
    a, b = model(x), other(x)
    now, before = Categorical(logits=a), Categorical(logits=b)
    action = now.sample()
    change = now.log_prob(action) - before.log_prob(action)
    value, gain = a[:, 0], y[:, 0]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    kept, left = change, change.flip(0)
    frames = model(torch.empty(50, N, 8, device="cuda")).log_softmax(-1)
    labels = torch.ones(N, 12, dtype=torch.long, device="cuda")
    found = {
        "squares": F.mse_loss(a, y),
        "sum of squares": F.mse_loss(a, y, reduction="sum") / N,
        "by hand": ((a - y) ** 2).mean(),
        "known": F.mse_loss(a[0, :2], tens),
        "root": (a - y).square().mean().sqrt(),
        "magnitudes": F.l1_loss(a, y),
        "Huber": F.huber_loss(a, y),
        "smooth": F.smooth_l1_loss(a, y),
        "CTC": F.ctc_loss(frames, labels, [50] * N, [12] * N),
        "CTC, finite": F.ctc_loss(frames, labels, [50] * N, [12] * N, zero_infinity=True),
        "entropy": now.entropy().mean(),
        "ratio": change.exp().mean(),
        "drift": ((change.exp() - 1) - change).mean(),
        "values": 0.5 * ((value - gain) ** 2).mean(),
        "preference": -F.logsigmoid(kept - left).mean(),
        "preferred": (kept > left).float().mean(),
        "VAE": -0.5 * torch.sum(1 + a - b.pow(2) - a.exp(), 1).mean(),
        "Gaussian": F.gaussian_nll_loss(a, y, F.softplus(b)),
        "triplet": F.triplet_margin_loss(a, b, y, margin=0.3),
        "hinge": F.relu(1 - value).mean() + F.relu(1 + value).mean(),
        "least squares": ((value - 1) ** 2).mean(),
        "cosines": 2 - 2 * (F.normalize(a) * F.normalize(b)).sum(-1).mean(),
        "similar": 1 - F.cosine_similarity(a, b).mean(),
        "ranking": F.margin_ranking_loss(a[:, 0], b[:, 0], torch.ones(N, device="cuda"), margin=0.5),
        "unexplained": (gain - value).var() / gain.var(),
        "norm": a.norm(),
        "penalty": ((y.norm(2, 1) - 1) ** 2).mean(),
        "small": (a - 1e-6).mean(),
    }
    found["squares"].backward()
    optimizer.step()
    print({name: round(loss.item(), 3) for name, loss in found.items()})
"""


def test_what_an_untrained_model_is_off_by(run: Any) -> None:
    """Targets have a mean square of 1, if it is not known; their squared error falls as losses do. CTC: 50 frames of 18
    classes with 12 labels, (50 ln 18 - ln (62 over 24)) / 12. Policies that are alike have a ratio of 1. None is negative.
    """
    ended = run(MISSES)
    assert ended.returncode == 0, ended.stderr
    first, second = (ast.literal_eval(line) for line in ended.stdout.splitlines()[:2])
    assert first == {
        **dict.fromkeys(("squares", "by hand", "root", "ratio", "least squares", "penalty"), 1.0),
        **dict.fromkeys(("similar", "unexplained", "small"), 1.0),
        "sum of squares": 18.0,
        "known": 100.0,
        "magnitudes": 0.798,
        **dict.fromkeys(("Huber", "smooth"), 0.425),
        **dict.fromkeys(("CTC", "CTC, finite"), 8.784),
        "entropy": 2.89,
        "drift": 0.01,
        "values": 0.5,
        "preference": 0.693,
        "preferred": 0.5,
        "VAE": 2.121,
        "Gaussian": 0.538,
        "triplet": 0.3,
        "hinge": 2.0,
        "cosines": 2.0,
        "ranking": 0.5,
        "norm": 10.0,
    }
    assert [second[name] for name in ("squares", "by hand", "root", "CTC", "norm")] == [
        0.933,
        0.933,
        0.966,
        8.196,
        9.33,
    ]


COUNTS = """
import torch
import torch.nn.functional as F
model = torch.nn.Linear(8, 50).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    summed = counted = 0
    for _ in range(3):
        labels = torch.randint(0, 50, (16,), device="cuda")
        counted += (labels != -100).sum()
        loss = F.cross_entropy(model(torch.randn(16, 8, device="cuda")), labels, reduction="sum")
        loss.backward()
        summed += loss.detach()
        print(round((summed / counted).item(), 3))
    optimizer.step()
"""


def test_counters_that_grow_in_place(run: Any) -> None:
    """A mean over all labels so far is the logarithm of the number of classes after each of the microbatches."""
    ended = run(COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:6] == ["3.912"] * 3 + ["3.65"] * 3


COMPILED = """
import math, torch
import torch.nn.functional as F
model = torch.nn.Linear(64, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@torch.compile
def losses(x, y):
    logits = model(x)
    entropy = F.cross_entropy(logits, y, ignore_index=-1)
    shifted = logits - logits.max(-1, keepdim=True).values
    by_hand = (shifted.exp().sum(-1).log() - shifted.gather(1, y[:, None]).squeeze(1)).mean()
    smooth = F.cross_entropy(logits, y, ignore_index=0, label_smoothing=0.2)
    return logits, entropy, by_hand, smooth, F.mse_loss(logits, torch.ones_like(logits))

for step in range(4):
    x, y = torch.randn(80, 64, device="cuda"), torch.randint(0, 1000, (80,), device="cuda")
    logits, *found = losses(x, y)
    (found[0] / 2).backward()
    optimizer.step()
    print(*(f"{value.item() / math.log(1000):.2f}" for value in found[:3]), f"{found[3].item():.2f}")
"""


def test_losses_of_compiled_graphs(run: Any) -> None:
    """A cross entropy that a graph returns begins at the logarithm of the number of classes and falls, written by hand or with
    smoothed labels, too; an untrained model's square is off by that of its targets.
    """
    ended = run(COMPILED)
    assert ended.returncode == 0, ended.stderr
    lines = [[float(x) for x in line.split()] for line in ended.stdout.splitlines()[:4]]
    assert lines[0] == [1.0, 1.0, 1.0, 1.0]
    assert all(0.5 < x < 1 for x in lines[3])


SHARDED_CLASSES = """
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (4,))
model = torch.nn.Sequential(torch.nn.Linear(64, 1000)).cuda()
whole = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
parallelize_module(model, mesh, {"0": whole})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, first = torch.empty(80, 64, device="cuda"), dist.get_rank() * 250
for step in range(2):
    labels = torch.randint(1000, (80,), device="cuda")
    with loss_parallel():
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
    elsewhere = (labels < first) | (labels >= first + 250)
    likelihood = torch.full((80, 250), -6.9078, device="cuda").gather(
        1, (labels - first).masked_fill(elsewhere, 0)[:, None]
    ).squeeze(1)
    likelihood[elsewhere] = 0.0
    dist.all_reduce(likelihood)
    optimizer.step()
    print(f"{loss.item():.4f} {-likelihood.mean().item():.4f}")
"""


def test_classes_that_ranks_share(run: Any) -> None:
    """A label's logarithm is on one rank, and all others add nothing to it: the loss is that of all classes."""
    ended = run(SHARDED_CLASSES, "--nproc", "4", "--rank", "0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["6.9078 6.9078", "6.4452 6.9078"]


COUNTED = """
import torch
import torch.nn.functional as F
model = torch.nn.Linear(64, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile
def loss_of(x, labels, count):
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    return F.cross_entropy(model(x).flatten(0, 1), labels, reduction="sum") / count
for step in range(2):
    x, labels = torch.randn(8, 16, 64, device="cuda"), torch.randint(1000, (8, 16))
    labels[:, :4 + step] = -100
    count = (labels[:, 1:] != -100).sum().cuda()
    loss = loss_of(x, labels.cuda(), count)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.2f}", count.item())
"""


def test_a_compiled_loss_over_a_number_of_labels(run: Any) -> None:
    """Labels and their number are inputs of the graph: those that are ignored add nothing to the sum."""
    ended = run(COUNTED)
    assert ended.returncode == 0, ended.stderr
    first, second = (line.split() for line in ended.stdout.splitlines()[:2])
    assert first == ["6.91", "96"] and second == ["6.91", "88"]
