"""Which linear layer feeds which: seen in one pass of a small model.

Owns the marks on tensors. What a linear layer gives is marked with it; operations that work on each feature by itself
hand the mark on. Where nothing but the next linear layer takes the features, both can be cut along them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Fed(NamedTuple):
    """What a linear layer takes from another: all of its features, or one of several equal parts of them."""

    layer: str
    part: int
    parts: int


class Flow(NamedTuple):
    """What was seen.

    Attributes:
        fed: of each linear layer that takes only features of others, what they are.
        escaped: the layers whose features something else takes, too.
        called: the modules that were called; the parameters of others are used by the modules that hold them.
    """

    fed: dict[str, frozenset[Fed]]
    escaped: set[str]
    called: set[str]


#: Operations that hand on each number as it is, where the last dim keeps its size.
_KEEPING = frozenset(
    {"view", "_unsafe_view", "reshape", "clone", "detach", "_to_copy", "alias", "unsqueeze", "squeeze"}
)
#: Operations that cut a tensor into parts.
_CUTTING = frozenset({"split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"})


class _Marks(TorchDispatchMode):
    """Sees every operation, and hands marks on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # likewise
        self._marks: dict[int, tuple[Tensor, frozenset[Fed]]] = {}  # with the tensor, so that its id is no other's
        self.escaped: set[str] = set()
        self.inside = 0

    def mark(self, tensor: Tensor, fed: frozenset[Fed]) -> None:
        self._marks[id(tensor)] = tensor, fed

    def of(self, tensor: Any) -> frozenset[Fed]:
        return self._marks[id(tensor)][1] if id(tensor) in self._marks else frozenset()

    def escape(self, fed: frozenset[Fed]) -> None:
        self.escaped |= {one.layer for one in fed}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = _tensors([*args, *(kwargs or {}).values()])
        fed = frozenset[Fed]().union(*map(self.of, inputs))
        if fed and not self.inside:
            self._hand_on(func, inputs, output, fed)
        return output

    def _hand_on(self, func: Any, inputs: list[Tensor], output: Any, fed: frozenset[Fed]) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        width = next(tensor for tensor in inputs if self.of(tensor)).shape[-1:]
        if isinstance(output, Tensor):
            others = [tensor for tensor in inputs if not self.of(tensor)]
            is_featurewise = torch.Tag.pointwise in func.tags or name == "native_dropout"
            is_alone = all(not one.dim() or one.shape[-1] == 1 for one in others)
            if output.shape[-1:] == width and (name in _KEEPING or (is_featurewise and is_alone)):
                self.mark(output, fed)
                return
        elif name in _CUTTING and len(fed) == 1:
            parts, whole = list(output), next(iter(fed))
            if whole.parts == 1 and {part.shape[-1] * len(parts) for part in parts} == set(width):
                for number, part in enumerate(parts):
                    self.mark(part, frozenset({Fed(whole.layer, number, len(parts))}))
                return
        self.escape(fed)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


class _Tracer:
    """Hooks on the modules of one model."""

    def __init__(self) -> None:
        self.marks = _Marks()
        self.fed: dict[str, frozenset[Fed]] = {}
        self.called: set[str] = set()

    def enter_any(self, name: str, *_: Any) -> None:
        self.called.add(name)

    def enter(self, name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        taken = self.marks.of(arguments[0]) if arguments else frozenset[Fed]()
        if name in self.fed and self.fed[name] != taken:
            self.marks.escape(self.fed[name] | taken)
        self.fed[name] = taken
        self.marks.inside += 1

    def leave(self, name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        self.marks.inside -= 1
        self.marks.mark(output, frozenset({Fed(name, 0, 1)}))


def trace(model: nn.Module, inputs: Mapping[str, Tensor], is_linear: Callable[[nn.Module], bool]) -> Flow:
    """Run a model once, and see which of its linear layers feed which.

    Args:
        model: a small one.
        inputs: what it is called with.
        is_linear: whether a module is a linear layer.
    """
    tracer = _Tracer()
    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(tracer.enter_any, name)))
        if is_linear(module):
            hooks.append(module.register_forward_pre_hook(partial(tracer.enter, name)))
            hooks.append(module.register_forward_hook(partial(tracer.leave, name)))
    try:
        with torch.no_grad(), tracer.marks:
            output = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for value in _tensors(list(output.values())):
        tracer.marks.escape(tracer.marks.of(value))
    return Flow({name: taken for name, taken in tracer.fed.items() if taken}, tracer.marks.escaped, tracer.called)
