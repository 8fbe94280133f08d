"""Trace which linear layers feed which, in one forward pass of a small model.

The output of each linear layer is marked with that layer. Operations that keep features apart pass the marks on to
their outputs. Two layers can be sharded along the features between them if nothing else uses those features.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Features(NamedTuple):
    """Features from a linear layer: all of its outputs, or one of several equal segments of them.

    Attributes:
        layer: name of the layer.
        segment: index of the segment.
        segments: number of segments; 1 for all outputs.
    """

    layer: str
    segment: int
    segments: int


class LayerGraph(NamedTuple):
    """Connections between the linear layers of a model.

    Attributes:
        inputs: for each linear layer whose inputs come from other linear layers only, these features.
        escaped: layers whose features something else uses, too.
        called: modules that were called. Parameters of other modules are used by the modules that contain them.
    """

    inputs: dict[str, frozenset[Features]]
    escaped: set[str]
    called: set[str]


#: Operations that keep every value; they pass marks on if the size of the last dim stays the same.
_VALUE_PRESERVING = frozenset(
    {"view", "_unsafe_view", "reshape", "clone", "detach", "_to_copy", "alias", "unsqueeze", "squeeze"}
)
#: Operations that divide a tensor into segments.
_SPLITTING = frozenset({"split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"})


class _Marks(TorchDispatchMode):
    """Intercepts every operation, and passes marks from its inputs to its outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._marks: dict[
            int, tuple[Tensor, frozenset[Features]]
        ] = {}  # the tensor is kept, so that its id stays taken
        self.escaped: set[str] = set()
        self.num_entered = 0  # linear layers that are running

    def mark(self, tensor: Tensor, features: frozenset[Features]) -> None:
        """Mark a tensor."""
        self._marks[id(tensor)] = tensor, features

    def of(self, tensor: object) -> frozenset[Features]:
        """The marks of a tensor."""
        return self._marks[id(tensor)][1] if id(tensor) in self._marks else frozenset()

    def escape(self, features: frozenset[Features]) -> None:
        """Record that something other than a linear layer uses features."""
        self.escaped |= {one.layer for one in features}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        output = func(*args, **(kwargs or {}))
        inputs = _tensors([*args, *(kwargs or {}).values()])
        features = frozenset[Features]().union(*map(self.of, inputs))
        if features and not self.num_entered:
            self._propagate(func, inputs, output, features)
        return output

    def _propagate(self, func: OpOverload, inputs: list[Tensor], output: object, features: frozenset[Features]) -> None:
        name = func.__name__.partition(".")[0]
        width = next(tensor for tensor in inputs if self.of(tensor)).shape[-1:]
        if isinstance(output, Tensor):
            others = [tensor for tensor in inputs if not self.of(tensor)]
            is_pointwise = torch.Tag.pointwise in func.tags or name == "native_dropout"
            are_broadcast = all(not one.dim() or one.shape[-1] == 1 for one in others)
            if output.shape[-1:] == width and (name in _VALUE_PRESERVING or (is_pointwise and are_broadcast)):
                self.mark(output, features)
                return
        elif isinstance(output, list | tuple) and name in _SPLITTING and len(features) == 1:
            segments, full = list(output), next(iter(features))
            if full.segments == 1 and {segment.shape[-1] * len(segments) for segment in segments} == set(width):
                for index, segment in enumerate(segments):
                    self.mark(segment, frozenset({Features(full.layer, index, len(segments))}))
                return
        self.escape(features)


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors among values and in nested lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


class _Tracer:
    """Forward hooks for the modules of one model."""

    def __init__(self) -> None:
        self.marks = _Marks()
        self.inputs: dict[str, frozenset[Features]] = {}
        self.called: set[str] = set()

    def enter_module(self, name: str, *_: object) -> None:
        self.called.add(name)

    def enter_linear(self, name: str, _: nn.Module, arguments: tuple[object, ...]) -> None:
        features = self.marks.of(arguments[0]) if arguments else frozenset[Features]()
        if name in self.inputs and self.inputs[name] != features:
            self.marks.escape(self.inputs[name] | features)
        self.inputs[name] = features
        self.marks.num_entered += 1

    def leave_linear(self, name: str, _: nn.Module, __: object, output: Tensor) -> None:
        self.marks.num_entered -= 1
        self.marks.mark(output, frozenset({Features(name, 0, 1)}))


def trace_layers(model: nn.Module, inputs: Mapping[str, Tensor], is_linear: Callable[[nn.Module], bool]) -> LayerGraph:
    """Run a model once, and record which of its linear layers feed which.

    Args:
        model: a small model.
        inputs: of the model.
        is_linear: whether a module is a linear layer.
    """
    tracer = _Tracer()
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(tracer.enter_module, name)))
        if is_linear(module):
            hooks.append(module.register_forward_pre_hook(partial(tracer.enter_linear, name)))
            hooks.append(module.register_forward_hook(partial(tracer.leave_linear, name)))
    try:
        with torch.no_grad(), tracer.marks:
            output = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for value in _tensors(output.values()):
        tracer.marks.escape(tracer.marks.of(value))
    fed = {name: features for name, features in tracer.inputs.items() if features}
    return LayerGraph(fed, tracer.marks.escaped, tracer.called)
