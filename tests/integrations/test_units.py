"""A module under a plan stays the module that it was: class, names, hooks, copies. Real tensors on the CPU."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import plans
from autosac.errors import PlanError
from autosac.integrations.apply import Checkpointed, apply
from autosac.integrations.recompute.memories import all_tensors
from autosac.plans import Plan, Unit
from plans import MADE_FOR


class Body(nn.Module):
    """A module with an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """What forward uses."""
        return x * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self.scaled(self.linear(x)).sin().exp()


AGAIN = ["aten.mul.Tensor"]  # what the sine saved; the exponential saved its result, which is returned


def planned(lab: Any, model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The model with its unit `0`, which keeps the linear layer's result."""
    plan, again = lab.plan_keeping(model, lambda m: m(x), {"0": {"aten.addmm.default"}})
    assert again == {"0": AGAIN}
    return apply(model, plan)


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    model.zero_grad()
    out = model(x)
    out.sum().backward()
    return (out.detach(), *(p.grad.clone() for p in model.parameters()))


@pytest.fixture
def x() -> torch.Tensor:
    """An input."""
    torch.manual_seed(0)
    return torch.randn(2, 4)


def test_a_unit_is_the_same_object_of_its_class(lab: Any, x: torch.Tensor) -> None:
    """Identity, isinstance, the class's name, attributes, methods, and the names of modules, parameters and state."""
    model = nn.Sequential(Body())
    body, weight = model[0], model[0].linear.weight
    modules, parameters = [name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]
    state = list(model.state_dict())
    planned(lab, model, x)
    assert model[0] is body and isinstance(body, Body) and isinstance(body, Checkpointed)
    assert type(body).__name__ == "Body" and type(body).__module__ == Body.__module__
    assert body.linear.weight is weight and body.factor == 2.0 and torch.equal(body.scaled(x), x * 2)
    assert [name for name, _ in model.named_modules()] == modules
    assert [name for name, _ in model.named_parameters()] == parameters
    assert list(model.state_dict()) == state == ["0.linear.weight", "0.linear.bias"]
    assert repr(model) == repr(nn.Sequential(Body()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "weights_only"])
def test_copies_are_units_too(lab: Any, x: torch.Tensor, how: str) -> None:
    """Copied, pickled, saved with torch.save and loaded by whoever allows the model's own classes: the copy has parameters
    of its own, and obeys the plan.
    """
    model = planned(lab, nn.Sequential(Body()), x)
    wanted = gradients(model, x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        classes = [nn.Sequential, nn.Linear, Body]
        with torch.serialization.safe_globals(classes if how == "weights_only" else []):
            other = torch.load(file, weights_only=how == "weights_only")
    assert type(other[0]) is type(model[0]) and other[0].linear.weight is not model[0].linear.weight
    with lab.counting(other, ["0"]) as ran:
        assert lab.same(gradients(other, x), wanted)
    assert ran.again == {"0": AGAIN}
    with torch.no_grad():
        other[0].linear.weight.zero_()
    assert lab.same(gradients(model, x), wanted)


def test_hooks_run_once(lab: Any, x: torch.Tensor) -> None:
    """Forward hooks of the unit and of a module inside run in the forward only, backward hooks once; what they
    return is used.
    """
    model = nn.Sequential(Body())
    plain = copy.deepcopy(model)
    planned(lab, model, x)
    seen: dict[int, list[str]] = {0: [], 1: []}
    for i, m in enumerate((model, plain)):
        m[0].register_forward_pre_hook(lambda _, args, i=i: (seen[i].append("pre"), (args[0] + 1,))[1])
        m[0].register_forward_hook(lambda _, __, out, i=i: (seen[i].append("post"), out * 2)[1])
        m[0].linear.register_forward_hook(lambda _, __, out, i=i: (seen[i].append("inner"), out.sigmoid())[1])
        m[0].register_full_backward_hook(lambda *_, i=i: seen[i].append("backward"))
    assert lab.same(gradients(model, x), gradients(plain, x))
    assert seen[0] == seen[1] == ["pre", "inner", "post", "backward"]


class Told:
    """Forwards that tell of themselves in several ways."""

    class Plainly(Body):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """Scaled."""
            return self.scaled(self.linear(x)).sin().exp() * scale

        forward.takes_scale = True  # type: ignore[attr-defined]

    class Statically(Body):
        @staticmethod
        def forward(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            """Scaled."""
            return x * scale

    class ByAnObject(Body):
        forward = functools.partial(lambda x, scale=1.0: x * scale)


@pytest.mark.parametrize("kind", [Body, Told.Plainly, Told.Statically, Told.ByAnObject])
@pytest.mark.parametrize("is_own", [False, True])
def test_the_forward_of_a_unit_tells_what_the_original_tells(kind: Any, is_own: bool, x: torch.Tensor) -> None:
    """Other code may ask for its signature, and pass what it takes: of the class, of a unit, and of a copy of the unit."""
    model = nn.Sequential(kind())
    if is_own:
        model[0].forward = lambda x, /, self=2, *rest, gain=0.5: x * self * gain
    unit, plain = Unit(fqn="0", discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=()), model[0].forward
    signature, names = (
        inspect.signature(plain),
        [a for a in ("__name__", "__doc__", "takes_scale") if hasattr(plain, a)],
    )
    arguments, about = inspect.getfullargspec(plain).args, [getattr(plain, name) for name in names]
    apply(model, Plan(made_for=MADE_FOR, units=(unit,)))
    forward = model[0].forward
    assert isinstance(model[0], Checkpointed)
    assert inspect.signature(forward) == signature
    assert inspect.getfullargspec(forward).args[-1] == arguments[-1]
    assert [getattr(forward, name) for name in names] == about
    if not is_own:
        assert inspect.signature(copy.deepcopy(model)[0].forward) == signature


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated where they are written")
def test_annotations_that_only_type_checkers_know(lab: Any, x: torch.Tensor) -> None:
    """A forward whose annotations cannot be evaluated is called as before, and says the same of itself."""
    import annotationlib

    source = "class Typed(Body):\n    def forward(self, x: Unknown) -> Unknown: return Body.forward(self, x)"
    exec(compile(source, "<typed>", "exec", dont_inherit=True), known := {"Body": Body})
    model = nn.Sequential(known["Typed"]())
    wanted = gradients(copy.deepcopy(model), x)
    planned(lab, model, x)
    assert lab.same(gradients(model, x), wanted)
    told = annotationlib.get_annotations(type(model[0]).forward, format=annotationlib.Format.STRING)
    assert told == {"x": "Unknown", "return": "Unknown"}
    assert str(inspect.signature(model[0].forward, annotation_format=annotationlib.Format.STRING)) == (
        "(x: Unknown) -> Unknown"
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_the_object_itself(lab: Any, x: torch.Tensor, when: str) -> None:
    """Set before the plan it is what is checkpointed; set afterwards it takes the place of the checkpointed one, as
    attributes do.
    """
    model = nn.Sequential(Body())
    plain = copy.deepcopy(model)

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.scaled(module.linear(x)).sin().exp()

    if when == "before":
        model[0].forward = lambda x: forward(model[0], x)
    planned(lab, model, x)
    if when == "after":
        model[0].forward = lambda x: forward(model[0], x)
    with lab.counting(model, ["0"]) as ran:
        assert lab.same(gradients(model, x), gradients(plain, x))
    assert ran.again == {"0": AGAIN if when == "before" else []}


def test_a_script_module_is_refused(lab: Any, x: torch.Tensor) -> None:
    """Its operators cannot be seen; nothing is changed."""
    model = nn.Sequential(Body(), nn.Linear(4, 4))
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": set(), "1": set()})
    model[1] = torch.jit.trace(model[1], x)
    with pytest.raises(
        PlanError, match="1 is a TorchScript module, whose operators cannot be seen: leave it out of the plan"
    ):
        apply(model, plan)
    assert type(model[0]) is Body


def test_a_module_that_is_never_called_is_refused(lab: Any, x: torch.Tensor) -> None:
    """A ModuleList has no forward."""
    model = nn.Sequential(nn.Identity())
    model.add_module("blocks", nn.ModuleList([Body()]))
    with pytest.raises(PlanError, match="blocks is a ModuleList, which is never called: choose modules inside it"):
        apply(model, lab.plan_for(model, {"blocks": ()}))


def test_a_slice_of_a_unit(lab: Any) -> None:
    """A slice of an nn.Sequential is made by its class and is no unit: it runs as it is."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": {"aten.addmm.default"}})
    apply(model, plan)
    assert torch.equal(model[0][:2](x), plain[0][:2](x))


def test_a_unit_shares_the_state_of_its_class(lab: Any, x: torch.Tensor) -> None:
    """What a unit sets or deletes on its class is set or deleted for all modules of the class; its subclasses keep theirs."""

    class Counting(Body):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """The output, and one call more."""
            type(self).calls += 1
            return super().forward(x)

    model = nn.Sequential(Counting(), Counting())
    planned(lab, model, x)
    Counting.calls = 0
    model(x)
    assert (Counting.calls, type(model[0]).calls, type(model[1]).calls) == (2, 2, 2)
    child = type("Child", (type(model[0]),), {})
    child.calls = 7
    assert (Counting.calls, child.calls) == (2, 7)
    del type(model[0]).calls
    assert not hasattr(Counting, "calls")


def test_making_a_unit_runs_no_code_of_its_class(lab: Any, x: torch.Tensor) -> None:
    """Neither __init_subclass__, which wants an argument, nor a metaclass, which counts; abstract classes stay abstract."""
    made: list[str] = []

    class Meta(abc.ABCMeta):
        def __new__(cls, name: str, bases: Any, body: Any, **options: Any) -> Any:
            made.append(name)
            return super().__new__(cls, name, bases, body, **options)

    class Base(Body, metaclass=Meta):
        def __init_subclass__(cls, *, label: str) -> None:
            made.append(label)

    class Named(Base, label="named"):
        """A subclass that is registered."""

    model = nn.Sequential(Named())
    expected = gradients(model, x)
    planned(lab, model, x)
    assert made == ["Base", "Named", "named"]
    assert (
        isinstance(model[0], Named) and isinstance(model[0], type(model[0])) and type(type(model[0])).__name__ == "Meta"
    )
    assert lab.same(gradients(model, x), expected)


def test_objects_in_circles_are_searched_once() -> None:
    """Of a thousand objects that all know each other, the tensors are found, each object is looked at once."""

    class Node:
        """Knows all others."""

        looked = 0

        def __init__(self, others: list[Node]) -> None:
            self.value, self.others = torch.zeros(1), others

        def __getattribute__(self, name: str) -> Any:
            Node.looked += name == "__dict__"
            return super().__getattribute__(name)

    others: list[Node] = []
    others += [Node(others) for _ in range(1000)]
    Node.looked = 0
    assert len(all_tensors(others[0])) == 1000
    assert Node.looked == 1000


def test_hooks_on_a_module_that_fsdp_shards_count_and_fsdps_do_not(lab: Any, mesh: Any) -> None:
    """As expert parallelism does, the inner module computes in hooks of its own. What they save is made again, like what the
    module computes; a plan that was made before FSDP came fits; the gradients are those without a plan.
    """

    def model() -> nn.Module:
        torch.manual_seed(0)
        outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        inner = outer[0][0]
        inner.register_forward_pre_hook(lambda _, args: (args[0].sin().exp(),))
        inner.register_forward_hook(lambda _, args, out: out.cos().tanh())
        return outer

    def sharded(module: nn.Module) -> nn.Module:
        for part in (module[0][0], module[0], module):
            fully_shard(part, mesh=mesh)
        return module

    x = torch.randn(3, 4, requires_grad=True)
    plan, again = lab.plan_keeping(model(), lambda m: m(x), {"0": set()})
    with lab.counting(planned := sharded(apply(model(), plan)), ["0"]) as ran, warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gradients(planned, x)
    made = ["aten.sin.default", "aten.exp.default", "aten.addmm.default", "aten.cos.default", "aten.tanh.default"]
    assert again == {"0": made}
    assert [op for op in ran.again["0"] if op != "aten.copy_.default"] == made  # FSDP copies what it gathers again
    plain = gradients(sharded(model()), x)
    for a, b in zip(out, plain, strict=True):
        assert torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))


LATE_COMPILER = """
import sys
import torch
from autosac.integrations.apply import apply
from autosac.plans import Plan, Unit
import plans
from plans import MADE_FOR

unit = Unit(fqn="0", discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=())
model = apply(torch.nn.Sequential(torch.nn.Linear(4, 4)), Plan(made_for=MADE_FOR, units=(unit,)))
model(torch.ones(2, 4)).sum().backward()
assert "torch._dynamo" not in sys.modules
with torch.device("meta"):
    print(torch.compile(torch.nn.Linear(4, 2), backend="eager")(torch.ones(2, 4)).shape)
"""


def test_the_compiler_may_be_imported_after_the_first_step() -> None:
    """What a planned step changes in PyTorch does not keep `torch.compile` from being imported."""
    paths = [path for path in (str(Path(plans.__file__).parent), os.environ.get("PYTHONPATH", "")) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run([sys.executable, "-c", LATE_COMPILER], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "torch.Size([2, 2])\n"), ended.stderr
