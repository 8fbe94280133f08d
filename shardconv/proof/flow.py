"""Which linear layer feeds which: seen in one pass of a small model.

Owns the marks on tensors. What a linear layer gives is marked with it; operations that work on each feature by itself
hand the mark on. Where nothing but the next linear layer takes the features, both can be cut along them.
"""

from collections.abc import Callable, Mapping
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
        fed: of each linear layer that takes only features of others, in their order, what they are.
        escaped: the layers whose features something else takes, too.
        called: the modules that were called; the parameters of others are used by the modules that hold them.
    """

    fed: dict[str, frozenset[Fed]]
    escaped: set[str]
    called: set[str]


#: Operations that keep the last dim as it is, if its size stays.
_KEEPING = {
    "view",
    "_unsafe_view",
    "reshape",
    "clone",
    "detach",
    "_to_copy",
    "contiguous",
    "alias",
    "unsqueeze",
    "squeeze",
}


class _Marks(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[int, tuple[Tensor, frozenset[Fed]]] = {}  # with the tensor, so that its id is no other's
        self.escaped: set[str] = set()
        self.depth = 0

    def mark(self, tensor: Tensor, fed: frozenset[Fed]) -> None:
        self.marks[id(tensor)] = tensor, fed

    def of(self, value: Any) -> frozenset[Fed]:
        return self.marks[id(value)][1] if id(value) in self.marks else frozenset()

    def escape(self, fed: frozenset[Fed]) -> None:
        self.escaped |= {one.layer for one in fed}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.depth:
            self._hand_on(func, [*_tensors(args), *_tensors(list((kwargs or {}).values()))], output, args)
        return output

    def _hand_on(self, func: Any, inputs: list[Tensor], output: Any, args: tuple[Any, ...]) -> None:
        fed = frozenset().union(*map(self.of, inputs))
        if not fed:
            return
        name = func.name().split("::")[1].split(".")[0]
        marked = [tensor for tensor in inputs if self.of(tensor)]
        width = marked[0].shape[-1] if marked[0].dim() else 0
        if isinstance(output, Tensor) and output.dim() and output.shape[-1] == width and output.numel():
            others = [tensor for tensor in inputs if not self.of(tensor)]
            is_featurewise = torch.Tag.pointwise in func.tags or name in ("native_dropout",)
            if name in _KEEPING or (is_featurewise and all(not one.dim() or one.shape[-1] == 1 for one in others)):
                self.mark(output, fed)
                return
        if name in ("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split") and len(fed) == 1:
            parts = list(output)
            whole = next(iter(fed))
            is_last = {part.shape[-1] * len(parts) for part in parts} == {width} and whole.parts == 1
            if is_last:
                for number, part in enumerate(parts):
                    self.mark(part, frozenset({Fed(whole.layer, number, len(parts))}))
                return
        self.escape(fed)


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def trace(model: nn.Module, inputs: Mapping[str, Tensor], is_linear: Callable[[nn.Module], bool]) -> Flow:
    """Run a model once, and see which of its linear layers feed which.

    Args:
        model: a small one.
        inputs: what it is called with.
        is_linear: whether a module is a linear layer.
    """
    marks, fed = _Marks(), dict[str, frozenset[Fed]]()

    def enter(name: str) -> Callable[..., None]:
        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            taken = marks.of(arguments[0]) if arguments else frozenset()
            if name in fed and fed[name] != taken:
                marks.escape(fed[name] | taken)
            fed[name] = taken
            marks.depth += 1

        return before

    def leave(name: str) -> Callable[..., None]:
        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            marks.depth -= 1
            marks.mark(output, frozenset({Fed(name, 0, 1)}))

        return after

    hooks: list[Any] = []
    called: set[str] = set()
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
        if is_linear(module):
            hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        with torch.no_grad(), marks:
            output = model(**inputs)
        for value in _tensors(list(output.values())):
            marks.escape(marks.of(value))
    finally:
        for hook in hooks:
            hook.remove()
    return Flow({name: taken for name, taken in fed.items() if taken}, marks.escaped, called)
