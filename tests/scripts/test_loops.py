"""Scripts that do more than train: they generate, evaluate, and let one rank do more than the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autosac.scripts.launch import ScriptResult
from autosac.scripts.request import ScriptRequest
from autosac.scripts.template import Template

PREFERENCES = """
import copy, torch, torch.nn.functional as F
from torch import nn

WIDTH, TOKENS = 64, 100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids, cache=None):
        x = self.tokens(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=ids.shape[1] > 1)
        return self.head(x + mixed.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def generate(self, ids, most):
        cache, done, token = [], torch.zeros(len(ids), dtype=torch.bool, device=ids.device), ids
        for _ in range(most):
            token = torch.multinomial(self(token, cache)[:, -1].softmax(-1), 1)
            token = torch.where(done[:, None], 2, token)
            done |= token[:, 0] == 2
            ids = torch.cat([ids, token], 1)
            if done.all():
                break
        return ids


def log_probability(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


policy = Model().cuda()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters())
for step in range(4):
    for _ in range(2):
        prompts = torch.randint(TOKENS, (4, 16)).cuda()
        pair = [policy.eval().generate(prompts, 12) for _ in range(2)]
        policy.train()
        wanted, other = [log_probability(policy, ids) for ids in pair]
        with torch.no_grad():
            base_wanted, base_other = [log_probability(reference, ids) for ids in pair]
        (-F.logsigmoid(wanted - other - base_wanted + base_other).mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    policy.eval()
    with torch.inference_mode():
        held_out = F.cross_entropy(policy(prompts).flatten(0, 1), prompts.flatten())
    policy.train()
    print("step", step, [tuple(ids.shape) for ids in pair], round(held_out.item(), 2))
"""
ENCODER = """
import torch
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    x, padding = torch.randn(4, 16, 64, device="cuda"), (torch.arange(16) > 11).expand(4, -1).cuda()
    model(x, src_key_padding_mask=padding).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():
        print(model.eval()(x, src_key_padding_mask=padding).shape)
    model.train()
"""
SPARSE = """
import torch

table = torch.nn.Embedding(1000, 16, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(table.parameters())
table(torch.arange(8, device="cuda")).sum().backward()
optimizer.step()
"""
SPARSE_BAG = """
import torch

bag = torch.nn.EmbeddingBag(1000, 16, sparse=True, mode="sum", padding_idx=0).cuda()
optimizer = torch.optim.SparseAdam(bag.parameters())
bag(torch.arange(8, device="cuda"), torch.tensor([0, 4], device="cuda")).sum().backward()
optimizer.step()
"""
ONE_RANK_EVALUATES = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = nn.Sequential(*[Block() for _ in range(2)]).cuda()
parallel = DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
for step in range(4):
    parallel(torch.randn(16384, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.randn(16384, 256, device="cuda"))
"""
TWO_MODELS = """
import torch
from torch import nn

def layers(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(count))).cuda()

generator, discriminator = layers(1), layers(4)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
for step in range(9):
    discriminator(generator(torch.randn(8, 64, device="cuda"))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def test_generation_goes_on_to_its_limit(run: Any) -> None:
    """Nobody knows when a sequence ends: 12 tokens follow 16, in a loop with a frozen reference and an evaluation."""
    ended = run(PREFERENCES)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all("[(4, 28), (4, 28)]" in line for line in lines)


def test_an_encoder_is_evaluated_with_padding(run: Any) -> None:
    """PyTorch's fast path of encoders asks for nested tensors; they are not used."""
    ended = run(ENCODER)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "torch.Size([4, 16, 64])"


RAGGED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (1000, 3000, 2000, 1500):
    model(torch.randn(rows, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("script", [SPARSE, SPARSE_BAG], ids=["Embedding", "EmbeddingBag with padding"])
def test_sparse_gradients_are_refused(run: Any, script: str) -> None:
    """With the reason, and where they come from."""
    ended = run(script)
    assert ended.returncode == 1
    assert "Embedding and EmbeddingBag with sparse=True make sparse gradients" in ended.stderr


def test_one_plan_for_ranks_with_the_same_modules(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 evaluates, so that two ranks are distinct, but they train alike: one is planned, found inside of DDP with each
    module once, and the other runs only under that plan. Nothing runs under full on both.
    """
    runs: list[tuple[int, bool]] = []
    real = Template.run

    def counted(self: Template, request: ScriptRequest) -> ScriptResult:
        runs.append((request.rank, bool(request.plan_file)))
        return real(self, request)

    monkeypatch.setattr(Template, "run", counted)
    ended = run(ONE_RANK_EVALUATES, "--nproc", "2", "--plan", "560MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert "ranks 0, 1 train alike: this is the plan of rank 1, verified on the others" in ended.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["made_for"]["model"] == "Sequential"  # not what is around it
    names = [unit["fqn"] for unit in plan["units"]]
    assert names and len(set(names)) == len(names) and set(names) <= {"0", "1"}
    assert set(plan["predictions"]) == {"autosac", "none"}
    assert plan["predictions"]["autosac"]["step_ms"] > plan["predictions"]["none"]["step_ms"] > 0
    assert [each for each in runs if each[0] == 0] == [(0, True)]
    assert (1, False) in runs


def test_ranks_with_other_batches_are_all_captured(run: Any, tmp_path: Path) -> None:
    """Rank 1 has fewer rows: it does not train alike, though its modules have the same names and follow the same plan."""
    script = ONE_RANK_EVALUATES.replace("randn(16384", "randn(16384 - 4096 * dist.get_rank()", 1)
    ended = run(script, "--nproc", "2", "--plan", "560MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert "modules of the distinct ranks have the same names: all follow the same decisions" in ended.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["units"]


def test_a_second_model_is_said_to_stay_as_it_is(run: Any) -> None:
    """Of a generator and a discriminator the one called first has the plan; the other has four fifths of the parameters."""
    ended = run(TWO_MODELS, "--plan", "1MiB", "--quiet")
    assert ended.returncode == 1
    said = "plans are for Sequential; modules outside of it, with 80% of what is trained, stay as they are"
    assert ended.stderr.strip().endswith(said)


CRITIC = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.last(nn.functional.gelu(self.first(x)))

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x)

generator, critic = nn.Linear(256, 256).cuda(), Critic().cuda()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(4):
    critic(generator(torch.randn(8192, 256, device="cuda"))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_model_whose_forwards_hold_most_is_planned(run: Any, tmp_path: Path) -> None:
    """A generator is called first, and has nothing to checkpoint: the plan is for the critic."""
    ended = run(CRITIC, "--plan", "380MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["made_for"]["model"] == "Critic"
    assert {unit["fqn"].split(".")[0] for unit in plan["units"]} == {"blocks"}


def test_a_plan_for_steps_of_several_sizes(run: Any) -> None:
    """Batches differ: the plan is made for the step that is reported, and the others follow it without an error."""
    ended = run(RAGGED, "--plan", "200MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert "plan written to plan.json" in ended.stdout


AVERAGES = """
import torch
model = torch.nn.Linear(8, 8).cuda()
averages = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 8, device="cuda")
for step in range(4):
    loss = model(x).norm()
    loss.backward()
    optimizer.step()
    averages = [average.lerp(p, 0.1).detach() for average, p in zip(averages, model.parameters())]
    print(f"{loss.item():.4f}")
"""


def test_averages_of_weights_belong_to_the_step_before(run: Any) -> None:
    """Also with gradients enabled: what reads parameters begins no step where a module's forward does."""
    ended = run(AVERAGES)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:3] == ["10.0000", "9.3303", "8.9596"]


SELDOM_EVALUATES = """
import sys
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model.train()
    model(torch.randn(8, 256).cuda()).sum().backward()
    optimizer.step()
    if step % int(sys.argv[1]) == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(20):
                model(torch.randn(4096, 256).cuda())
    print(torch.cuda.max_memory_allocated() >> 20, flush=True)
"""


def test_a_step_without_evaluation_is_reported(run: Any) -> None:
    """The batches of the first evaluation begin the second step; the third one only trains. Where every step evaluates, the
    third does, too: twenty forwards of 512 times as many rows.
    """
    seldom, always = (run(SELDOM_EVALUATES, "--json", "--quiet", arguments=(often,)) for often in ("4", "1"))
    assert seldom.returncode == always.returncode == 0, seldom.stderr + always.stderr
    trains, both = (json.loads(ended.stdout[ended.stdout.index("{") :]) for ended in (seldom, always))
    assert trains["script"]["kept"] == both["script"]["kept"] == 3
    assert both["step"]["step_ms"] > 10 * trains["step"]["step_ms"]
