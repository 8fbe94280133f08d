"""Hooks around operations: calls, phases and their order; hooks do not change results.

Every check runs with DTensor parameters and with shards of parallel layers, on two and on four ranks.
"""

import copy
from collections import Counter
from functools import partial, partialmethod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.overrides import wrap_torch_function
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardconv import ColumnParallelLinear, convert_model
from shardconv.tensor import ParamHook, use_param_hooks
from tests.support.matrix import each_once
from tests.support.ranks import on_ranks

FORWARD = ["pre_forward", "post_forward"]
BACKWARD = ["pre_backward", "post_backward"]
PHASES = ("pre", "post")


class Recorder(ParamHook):
    """Records each phase and its parameters."""

    def __init__(self, parameters, log=None, name=""):
        self.names = {id(parameter): key for key, parameter in parameters.items()}
        self.log = [] if log is None else log
        self.name = name

    def note(self, phase, params):
        assert isinstance(params, list)
        self.log.append((self.name + phase, "".join(self.names[id(param)] for param in params)))

    pre_forward, post_forward = map(partial(partialmethod, note), FORWARD)
    pre_backward, post_backward = map(partial(partialmethod, note), BACKWARD)

    def take(self):
        """Return and clear the record."""
        taken = list(self.log)
        self.log.clear()
        return taken


def around(params, phases):
    return [(phase, params) for phase in phases]


class Case:
    """A sharded weight [8, 6], a sharded bias [8], and tensors for operations with them."""

    def __init__(self, axis, kind):
        self.mesh = DeviceMesh.from_group(axis.group, "cpu") if kind == "dtensor" else None
        layer = ColumnParallelLinear(6, 8, group=axis)
        if self.mesh is None:
            self.w, self.b = layer.weight, layer.bias
        else:
            self.w, self.b = (
                nn.Parameter(distribute_tensor(full.detach(), self.mesh, [Shard(0)]))
                for full in (layer.master_weight, layer.master_bias)
            )
        self.x = self.tensor(3, 6).requires_grad_()
        self.recorder = Recorder({"w": self.w, "b": self.b})

    def tensor(self, *shape):
        values = torch.randn(shape)
        return values if self.mesh is None else distribute_tensor(values, self.mesh, [Replicate()])

    def linear(self):
        return F.linear(self.x, self.w, self.b)

    def grads(self):
        """Return and clear the gradients."""
        found = [None if one.grad is None else full(one.grad).clone() for one in (self.w, self.b, self.x)]
        self.w.grad = self.b.grad = self.x.grad = None
        return found


def full(tensor):
    """The values, read without firing hooks."""
    with use_param_hooks():
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def same(found, expected):
    return len(found) == len(expected) and all(
        one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )


# --- order ----------------------------------------------------------------------------------------------------------


def check_order(axis, kind):
    case = Case(axis, kind)
    log = []
    first, second = (Recorder({"w": case.w, "b": case.b}, log, name) for name in ("1 ", "2 "))
    with use_param_hooks(first, second):
        output = case.linear()
        assert log == [(f"{name} {phase}", "wb") for phase in FORWARD for name in (1, 2)]
        log.clear()
    output.sum().backward()  # after the context
    assert log == [(f"{name} {phase}", "wb") for phase in BACKWARD for name in (1, 2)]
    log.clear()
    case.linear().sum().backward()
    assert log == []


def check_uses(axis, kind):
    """Check that a parameter passed twice is listed twice, and that each use fires."""
    case = Case(axis, kind)
    recorder = case.recorder
    with use_param_hooks(recorder):
        (case.w * case.w).sum().backward()
        assert recorder.take() == [*around("ww", FORWARD), *around("ww", BACKWARD)]
        torch.cat([case.w, case.w, case.w.detach()]).sum().backward()
        assert recorder.take() == [*around("w", FORWARD), *around("ww", FORWARD), *around("ww", BACKWARD)]
        (case.linear().sum() + case.linear().sum()).backward()
        assert recorder.take() == [*around("wb", FORWARD * 2), *around("wb", BACKWARD * 2)]


def check_passes(axis, kind):
    """Check that backward phases fire once per backward pass with the operation."""
    case = Case(axis, kind)
    recorder = case.recorder
    with use_param_hooks(recorder):
        output = case.linear().sum()
        recorder.take()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        assert recorder.take() == around("wb", BACKWARD * 2)
        torch.autograd.grad(output, case.x, retain_graph=True)
        assert recorder.take() == around("wb", BACKWARD)
        torch.autograd.grad(output, [case.w], retain_graph=True)
        assert recorder.take() == around("wb", BACKWARD)
        output.backward(inputs=[case.w])
        assert recorder.take() == around("wb", BACKWARD)


def check_second_derivative(axis, kind):
    """Check second derivatives by the output and, for a linear first derivative, by the weight alone."""
    case = Case(axis, kind)
    for loss in (lambda output: output.pow(2).sum(), torch.sum):

        def run(expect, loss=loss):
            (slope,) = torch.autograd.grad(loss(F.linear(case.x, case.w)), case.x, create_graph=True)
            slope.pow(2).sum().backward()
            expect([*around("w", FORWARD), *around("w", BACKWARD * 2)])
            return slope

        with_and_without_hooks(case, run)


class Noted(torch.autograd.Function):
    """The product of two tensors; records its calls."""

    @staticmethod
    def forward(ctx, log, first, second):
        ctx.log = log
        ctx.save_for_backward(first, second)
        log.append(("operation", ""))
        return first * second

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors
        ctx.log.append(("its backward", ""))
        return None, grad * second, grad * first


@wrap_torch_function(lambda log, x, weight: (x, weight))
def two_steps(log, x, weight):
    """An operation of several nodes; the weight's gradient is computed before the last of them."""
    return Noted.apply(log, Noted.apply(log, x, weight.detach()), weight)


def check_brackets(axis, kind):
    """Check that all nodes of an operation are computed between its phases, forward and backward."""
    case = Case(axis, kind)
    x = case.w.detach().clone().requires_grad_()
    expected = around("w", ["pre_forward", "post_forward"])
    expected[1:1] = [("operation", "")] * 2
    expected += [("pre_backward", "w"), ("its backward", ""), ("its backward", ""), ("post_backward", "w")]
    for weight_requires_grad in (True, False):
        case.w.requires_grad_(weight_requires_grad)
        with use_param_hooks(case.recorder):
            output = two_steps(case.recorder.log, x, case.w)
        output.sum().backward()
        assert case.recorder.take() == expected


# --- operations that fire hooks -------------------------------------------------------------------------------------


@wrap_torch_function(lambda options: (options["weights"][0],))
def of_dict(options):
    """An operation with parameters in a dict; returns a dict."""
    return {"sum": options["weights"][0].sum(), "input": options["weights"][0]}


def check_arguments_and_results(axis, kind):
    case = Case(axis, kind)
    w, recorder = case.w, case.recorder
    once = around("w", FORWARD)
    with use_param_hooks(recorder):
        F.linear(input=case.x, weight=w)
        assert recorder.take() == once
        result = of_dict({"weights": [w]})
        assert result["input"] is w
        assert recorder.take() == once
        result["sum"].backward()
        assert recorder.take() == around("w", BACKWARD)
        values, indices = w.max(dim=1)
        assert recorder.take() == once
        values.sum().backward()
        assert recorder.take() == around("w", BACKWARD)
        parts = torch.unbind(w, dim=1)
        assert recorder.take() == once
        torch.stack(parts).sum().backward()  # of six views
        assert recorder.take() == [*around("wwwwww", FORWARD), *around("wwwwww", BACKWARD), *around("w", BACKWARD)]
        assert not indices.requires_grad
        assert w.argmax().item() >= 0
        assert recorder.take() == once  # its result is not a view
        assert w.contiguous() is w
        assert w.to(w.dtype) is w
        assert recorder.take() == once * 2
        w.requires_grad_(False)
        case.b.requires_grad_(False)
        F.linear(case.x.detach(), w, case.b)  # no tensor requires grad
        assert recorder.take() == around("wb", FORWARD)
        case.linear().sum().backward()  # the input requires grad
        assert recorder.take() == [*around("wb", FORWARD), *around("wb", BACKWARD)]


def check_views(axis, kind):
    case = Case(axis, kind)
    recorder = case.recorder
    with use_param_hooks(recorder):
        turned = case.w.t()
        assert recorder.take() == around("w", FORWARD)
        output = case.x @ turned
        assert recorder.take() == around("w", FORWARD)
        output.sum().backward()
        assert recorder.take() == around("w", BACKWARD * 2)
        _ = case.x @ case.w.T  # a property is not an operation, but the product with its view is
        assert recorder.take() == around("w", FORWARD)
        _ = case.x @ case.w.detach().t()  # detached: not the parameter
        assert recorder.take() == around("w", FORWARD)


def check_silence(axis, kind):
    case = Case(axis, kind)
    w, recorder = case.w, case.recorder
    seen = []
    with use_param_hooks(recorder):
        _ = w.shape, w.grad, w.data, w.dtype, w.device, w.is_leaf, w.requires_grad, w.ndim, w.grad_fn
        _ = w.size(), w.dim(), w.stride(), w.numel(), len(w), w.is_contiguous(), repr(w), hash(w)
        assert w.requires_grad_() is w
        handle = w.register_hook(lambda grad: seen.append("grad"))
        later = w.register_post_accumulate_grad_hook(lambda param: seen.append(param is w))
        w.data = w.data
        w.grad = None
        assert recorder.take() == []
        w.sum().backward()
        assert seen == ["grad", True]
        handle.remove()
        later.remove()
        recorder.take()
        unsharded = nn.Parameter(case.x.detach().clone())  # replicated, or not a shard
        F.linear(unsharded, unsharded).sum().backward()
        case.x.sum().backward()
        assert recorder.take() == []
    assert copy.deepcopy(w).is_leaf


def check_no_grad(axis, kind):
    case = Case(axis, kind)
    recorder = case.recorder
    expected = full(case.linear())
    with use_param_hooks(recorder), torch.no_grad():
        output = case.linear()
        assert output.grad_fn is None
        assert recorder.take() == around("wb", FORWARD)
        before = full(case.w).clone()
        assert case.w.mul_(2) is case.w
        assert torch.equal(full(case.w), before * 2)
        assert case.w.grad_fn is None
        nn.init.zeros_(case.b)
        assert not full(case.b).any()
        assert recorder.take() == [*around("w", FORWARD), *around("b", FORWARD)]
    assert torch.equal(full(output), expected)
    case.linear().sum().backward()
    optimizer = torch.optim.SGD([case.w, case.b], lr=0.5)
    expected = full(case.w) - 0.5 * full(case.w.grad)
    with use_param_hooks(recorder):
        optimizer.step()
    assert torch.equal(full(case.w), expected)
    assert Counter(phase for phase, _ in recorder.take()).keys() == set(FORWARD)


def with_and_without_hooks(case, run):
    """The same with and without hooks; ``run`` returns a result, and expects these phases of a parameter."""
    results = []
    for hooks in ((), (case.recorder,)):

        def expect(log, hooks=hooks):
            assert case.recorder.take() == (log if hooks else [])

        with use_param_hooks(*hooks):
            found = run(expect)
        results.append([full(found), *case.grads()])
    assert same(*results)


def check_in_place(axis, kind):
    """Check in-place operations, and that torch still refuses leaves that require grad."""
    case = Case(axis, kind)

    def run(expect):
        changed = F.linear(case.x, case.w)
        expect(around("w", FORWARD))
        assert changed.mul_(case.b) is changed
        expect(around("b", FORWARD))
        changed.sum().backward()
        expect([*around("b", BACKWARD), *around("w", BACKWARD)])
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            case.w.add_(case.w)
        expect(around("ww", FORWARD))
        return changed

    with_and_without_hooks(case, run)


def check_set_items(axis, kind):
    """Check assignments to slices, whose node is that of the full tensor."""
    if kind == "dtensor":
        return  # torch does not have a strategy for it
    case = Case(axis, kind)

    def run(expect):
        rows = case.x.detach().new_zeros(2, *case.b.shape, requires_grad=True) * 2
        rows[0] = case.b
        expect(around("b", FORWARD))
        rows[1].mul_(case.b)
        expect(around("b", FORWARD))
        (rows * 3).sum().backward()
        expect(around("b", BACKWARD * 2))
        return rows

    with_and_without_hooks(case, run)


# --- nesting and failures -------------------------------------------------------------------------------------------


def check_nesting(axis, kind):
    case = Case(axis, kind)
    log = []
    outer, inner = (Recorder({"w": case.w, "b": case.b}, log, name) for name in ("outer ", "inner "))

    def phases(run):
        log.clear()
        run()
        return [phase for phase, _ in log]

    with use_param_hooks(outer):
        with use_param_hooks(inner):
            assert phases(case.linear) == ["inner pre_forward", "inner post_forward"]
            kept = case.linear()
            with use_param_hooks():
                assert phases(case.linear) == []
                assert phases(kept.sum().backward) == ["inner pre_backward", "inner post_backward"]
        assert phases(case.linear) == ["outer pre_forward", "outer post_forward"]
        with pytest.raises(ZeroDivisionError), use_param_hooks(inner):
            raise ZeroDivisionError
        assert phases(case.linear) == ["outer pre_forward", "outer post_forward"]
    assert phases(case.linear) == []


def check_failures(axis, kind):
    """Check that each pre phase has a post phase after an error, and that the next operation works."""
    case = Case(axis, kind)
    recorder = case.recorder

    class Refusing(Recorder):
        def pre_forward(self, params):
            raise ZeroDivisionError

    never = Recorder({"w": case.w, "b": case.b})
    with use_param_hooks(recorder):
        with pytest.raises((RuntimeError, ValueError)):
            F.linear(case.tensor(3, 5), case.w)
        assert recorder.take() == around("w", FORWARD)
        with use_param_hooks(recorder, Refusing({}), never), pytest.raises(ZeroDivisionError):
            case.linear()
        assert recorder.take() == around("wb", FORWARD)
        assert never.take() == []
        case.linear()
        assert recorder.take() == around("wb", FORWARD)


def check_hooks_that_compute(axis, kind):
    """Check that operations inside hooks do not fire hooks."""
    case = Case(axis, kind)
    log = []

    class Computing(Recorder):
        def note(self, phase, params):
            super().note(phase, params)
            with torch.no_grad():
                assert all(full(param).sum() == full(param + 0).sum() for param in params)

    outer = Recorder({"w": case.w, "b": case.b}, log, "outer ")
    with use_param_hooks(outer), use_param_hooks(Computing({"w": case.w, "b": case.b}, log)):
        case.linear().sum().backward()
    assert log == [*around("wb", FORWARD), *around("wb", BACKWARD)]


# --- recomputation --------------------------------------------------------------------------------------------------


def block(case):
    def run(x):
        hidden = F.linear(x, case.w, case.b)
        hidden = torch.tanh(hidden)  # uses recomputed values before any operation with parameters
        return torch.tanh(hidden @ case.w)

    return run


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks("four")
def test_checkpoint_without_hooks(axis, use_reentrant):
    """Check that a pass without hooks is recomputed without hooks, also after torch's checkpoint was patched."""
    case = Case(axis, "shard")
    with use_param_hooks():
        pass
    output = checkpoint(block(case), case.x, use_reentrant=use_reentrant)
    with use_param_hooks(case.recorder):
        output.sum().backward()
    assert case.recorder.take() == []


@pytest.mark.parametrize("kind", ["dtensor", "shard"])
@on_ranks("pairs")
def test_checkpoint_that_ends_in_an_operation(axis, kind):
    """Check recomputation that begins inside the backward of an operation."""
    case = Case(axis, kind)
    with use_param_hooks(case.recorder):
        output = checkpoint(lambda x: F.linear(x, case.w, case.b), case.x, use_reentrant=False)
        output.sum().backward()
    phases = [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD]
    assert case.recorder.take() == around("wb", phases)


@on_ranks("pairs")
def test_embedding_with_a_norm(axis):
    """Check an operation in place without a trailing underscore: max_norm rescales the rows that it reads."""
    layer = ColumnParallelLinear(6, 8, group=axis)
    recorder, ids = Recorder({"w": layer.weight}), torch.tensor([0, 2])
    unsharded = layer.weight.detach().clone()
    expected = F.embedding(ids, unsharded, max_norm=0.1)
    with use_param_hooks(recorder):
        found = F.embedding(ids, layer.weight, max_norm=0.1)
    assert torch.equal(found, expected)
    assert torch.equal(layer.weight, unsharded)
    assert recorder.take() == around("w", FORWARD)


# --- converted models -----------------------------------------------------------------------------------------------


def train(model, ids, hooks):
    model.zero_grad()
    with use_param_hooks(*hooks):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return {"logits": output.logits.detach(), **{name: one.grad.clone() for name, one in model.named_parameters()}}


KINDS_ON_LAYOUTS = pytest.mark.parametrize(("kind", "layout"), each_once(["dtensor", "shard"], ["pairs", "four"]))
CHECKS = [
    check_order, check_uses, check_passes, check_second_derivative, check_brackets,
    check_arguments_and_results, check_views, check_silence, check_no_grad, check_in_place, check_set_items,
    check_nesting, check_failures, check_hooks_that_compute,
]  # fmt: skip


@KINDS_ON_LAYOUTS
@pytest.mark.parametrize("check", CHECKS)
def test_phases(ranks, layout, kind, check):
    ranks(layout, check, kind)


@KINDS_ON_LAYOUTS
@pytest.mark.parametrize("where", ["inside", "behind", "other"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks()
def test_checkpoint(axis, kind, use_reentrant, early_stop, where):
    """Check that recomputation repeats forward phases with the hooks of the first pass, but not backward phases."""
    case = Case(axis, kind)
    case.x = case.tensor(3, 6).requires_grad_()
    other = Recorder({"w": case.w, "b": case.b})
    forward = [*around("wb", FORWARD), *around("w", FORWARD)]
    expected_output = block(case)(case.x)
    expected_output.sum().backward()
    expected = [full(expected_output), *case.grads()]
    with set_checkpoint_early_stop(early_stop):
        with use_param_hooks(case.recorder):
            output = checkpoint(block(case), case.x, use_reentrant=use_reentrant)
            assert case.recorder.take() == forward
            if where == "inside":
                output.sum().backward()
        if where == "behind":
            output.sum().backward()
        if where == "other":
            with use_param_hooks(other):
                output.sum().backward()
    log = case.recorder.take()
    assert log[: len(forward)] == forward
    assert log[len(forward) :] == [*around("w", BACKWARD), *around("wb", BACKWARD)]
    assert other.take() == []
    assert same([full(output), *case.grads()], expected)


@pytest.mark.parametrize(("recomputes", "layout"), each_once([None, True, False], ["pairs", "four"]))
@on_ranks()
def test_llama(axis, recomputes):
    """Check that hooks change no value, and that each use of a sharded parameter has all of its phases."""
    from tests.support.models import MODELS  # noqa: PLC0415 - transformers takes seconds to import

    model = convert_model(MODELS["llama"].build(0.1), group=axis).train()
    ids = torch.arange(2, 14).view(2, 6)
    if recomputes is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recomputes})
        model.enable_input_require_grads()
    recorder = Recorder({f"{name} ": parameter for name, parameter in model.named_parameters()})
    expected, found = train(model, ids, ()), train(model, ids, (recorder,))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    counts = Counter(recorder.take())
    for phase in ("forward", "backward"):
        pre, post = ({name: counts[when, name] for when, name in counts if when == f"{at}_{phase}"} for at in PHASES)
        assert pre == post
        assert {name.strip() for name in pre} == {name for name in found if "norm" not in name} - {"logits"}
        # recomputation with use_reentrant=False begins in the backward of a layer's last operation
        times = {"forward": 1 if recomputes is None else 2, "backward": 2 if recomputes is False else 1}
        assert pre["model.layers.0.mlp.down_proj.weight "] == times[phase]
    with use_param_hooks(recorder):
        model.eval().generate(ids, max_new_tokens=2, do_sample=False)
    assert {phase for phase, _ in recorder.take()} == set(FORWARD)


def test_abstract_hook_is_refused():
    class Half(ParamHook):
        def pre_forward(self, params): ...

    with pytest.raises(TypeError, match="abstract"):
        Half()
