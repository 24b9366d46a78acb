"""Training loops: accumulation, pipelines, several losses, double backward, evaluation, failures, threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.families.plain import Plain, plain_job
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack


def _parts(batch: Any) -> list[Any]:
    half = batch[0].shape[0] // 2
    return [(batch[0][:half],), (batch[0][half:],)]


@family("accumulation", "gradients of several microbatches are accumulated")
def accumulation(rng: random.Random) -> Job:
    """Two microbatches, one after the other."""
    return plain_job(rng, lambda model, batch: [loss for part in _parts(batch) for loss in plain_step(model, part)])


@family("pipelined", "two forwards before two backwards, in order or reversed")
def pipelined(rng: random.Random) -> Job:
    """Microbatches as pipeline schedules run them."""
    backwards = rng.random() < 0.5

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        losses = [mean_square(model(*part)) for part in _parts(batch)]
        for loss in reversed(losses) if backwards else losses:
            loss.backward()
        return [loss.detach() for loss in losses]

    return plain_job(rng, step)


@family("several_losses", "several losses of one forward, each with a backward of its own")
def several_losses(rng: random.Random) -> Job:
    """Two backwards through one graph, the first with retain_graph."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        out = model(*batch)
        first, second = out.pow(2).mean(), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        return [first.detach(), second.detach()]

    return plain_job(rng, step)


@family("retained_graph", "the same loss is sent backward twice")
def retained_graph(rng: random.Random) -> Job:
    """retain_graph and again."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    return plain_job(rng, step)


@family("double_backward", "a gradient penalty: the gradient of a gradient")
def double_backward(rng: random.Random) -> Job:
    """autograd.grad with create_graph, then backward."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        x = batch[0].detach().requires_grad_()
        loss = mean_square(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + gradient.pow(2).sum()
        total.backward()
        return [total.detach()]

    return plain_job(rng, step)


@family("partial_gradients", "autograd.grad of some parameters, backward with inputs=, twice through one graph")
def partial_gradients(rng: random.Random) -> Job:
    """Gradients by parts."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        some = [p for name, p in model.named_parameters() if name.endswith("weight")][-2:]
        gradients = torch.autograd.grad(loss, some, retain_graph=True)
        loss.backward(inputs=[p for p in model.parameters() if p.requires_grad][:3])
        return [loss.detach(), *gradients]

    return plain_job(rng, step)


@family("evaluation_between", "evaluation in eval mode, under no_grad or inference_mode, between forward and backward")
def evaluation_between(rng: random.Random) -> Job:
    """An evaluation at an awkward moment."""
    context = rng.choice((torch.no_grad, torch.inference_mode))

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        model.eval()
        with context():
            seen = model(batch[0][:3]).clone()
        model.train()
        loss.backward()
        return [loss.detach(), seen]

    return plain_job(rng, step)


@family("eval_training", "training steps in eval mode, and gradients of a model that is not in training")
def eval_training(rng: random.Random) -> Job:
    """Dropout is off, gradients are on."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        model.train(batch[0].shape[0] % 2 == 1)
        return plain_step(model, batch)

    return plain_job(rng, step)


@family("dropped_forward", "forwards whose graphs are dropped without a backward, before and after the one that counts")
def dropped_forward(rng: random.Random) -> Job:
    """Losses that are only looked at."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        looked = mean_square(model(*batch)).item()
        loss = mean_square(model(*batch))
        held = model(*batch)
        loss.backward()
        del held
        return [loss.detach(), torch.tensor(looked)]

    return plain_job(rng, step)


@family("failed_forward", "a forward raises inside a unit; the step is tried again with other data")
def failed_forward(rng: random.Random) -> Job:
    """An error in the middle of a unit."""

    class Fragile(Plain):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            if self.fail:
                raise ValueError("bad batch")
            return super().forward(h)

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        Fragile.fail = True
        try:
            model(*batch)
        except ValueError:
            Fragile.fail = False
        return plain_step(model, batch)

    return stack(rng, Fragile, step=step)


@family("failed_backward", "a hook stops the first backward; the step is run again")
def failed_backward(rng: random.Random) -> Job:
    """An error in the middle of a backward."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        def fail(_: Tensor) -> None:
            raise ValueError("bad gradient")

        out = model.get_submodule("first")(batch[0])
        out.register_hook(fail)
        for block in model.get_submodule("blocks").children():
            out = block(out)
        try:
            mean_square(out).backward()
        except ValueError:
            for p in model.parameters():
                p.grad = None
        return plain_step(model, batch)

    return plain_job(rng, step)


@family("backward_in_thread", "forward and backward each in a thread of its own")
def backward_in_thread(rng: random.Random) -> Job:
    """Threads as a data-parallel trainer uses them."""
    which = rng.choice(("forward", "backward", "both"))

    def run(function: Any) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function())
            except Exception as e:
                errors.append(e)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        if which == "both":
            return run(lambda: plain_step(model, batch))
        loss = run(lambda: mean_square(model(*batch))) if which == "forward" else mean_square(model(*batch))
        if which == "backward":
            run(loss.backward)
        else:
            loss.backward()
        return [loss.detach()]

    return plain_job(rng, step)


@family("anomaly_mode", "the step runs under torch.autograd.detect_anomaly or with profiling on")
def anomaly_mode(rng: random.Random) -> Job:
    """Debugging tools around the step."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        with torch.autograd.set_detect_anomaly(True, check_nan=False), torch.autograd.profiler.record_function("step"):
            return plain_step(model, batch)

    return plain_job(rng, step)


@family("clipped_and_scaled", "a gradient scaler, clipping, and a loss that is scaled")
def clipped_and_scaled(rng: random.Random) -> Job:
    """What trainers do around the backward."""

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        loss = mean_square(model(*batch))
        (loss * 1024.0).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(1024.0)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [loss.detach(), norm.detach()]

    return plain_job(rng, step)


@family("truncated_units", "only a part of the units' outputs reaches the loss; some units get no gradient")
def truncated_units(rng: random.Random) -> Job:
    """Detached units and layers that are dropped."""
    which = rng.choice(("detached", "zero", "early"))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Plain(8, average=True) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            y = self.blocks[1](x)
            if which == "early":
                return y + self.blocks[0](y)
            y = y.detach() if which == "detached" else y * 0.0
            return self.blocks[2](x + y)

    return Job(Net(), ("blocks.0", "blocks.1", "blocks.2"), rows_of(8))


@family("two_models", "two models train each other: a generator and a discriminator with separate backwards")
def two_models(rng: random.Random) -> Job:
    """A GAN in one module."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = (
                nn.Sequential(Plain(8), nn.Linear(8, 8)),
                nn.Sequential(Plain(8, average=True), nn.Linear(8, 1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.judge(self.maker(x))

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        (x,) = batch
        maker, judge = model.get_submodule("maker"), model.get_submodule("judge")
        made = maker(x)
        judging = judge(made.detach()).pow(2).mean() + (judge(x) - 1).pow(2).mean()
        judging.backward()
        making = (judge(made) - 1).pow(2).mean()
        making.backward()
        return [judging.detach(), making.detach()]

    return Job(Gan(), ("maker.0", "judge.0"), rows_of(8), step)
