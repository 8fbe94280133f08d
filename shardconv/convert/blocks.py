"""One block of a model, and what stands at the end of a policy's paths in it.

Owns how a path is read, and which absence a policy allows.
"""

import re
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardconv.errors import PlanError
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.policy import STYLE_OF, Layer, Policy

_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_PATH = re.compile(rf"(?:{_STEP.pattern})(?:\.[^.\[\]]+|\[-?\d+\])*")


class Found(NamedTuple):
    """What stands at the end of a path.

    Attributes:
        owner: what has it.
        last: what it is called there.
        name: what it is called in the model.
        thing: itself.
    """

    owner: Any
    last: str
    name: str
    thing: Any


class Block:
    """A module that a policy applies to.

    Args:
        policy: what it is asked about it.
        name: of the module in the model.
        module: of exactly the policy's class.

    Raises:
        PlanError: if the policy's layers are none.
    """

    def __init__(self, policy: type[Policy], name: str, module: nn.Module) -> None:
        self.name, self.module, self.asked = name, module, policy(module)
        self.policy_name = policy.__name__
        self.layers = [(style, layer) for role, style in STYLE_OF.items() for layer in getattr(self.asked, role)()]
        if strange := next((layer for _, layer in self.layers if not isinstance(layer, Layer)), None):
            raise self.error(f"{strange!r:.80} is no shardconv.Layer")

    def error(self, problem: str) -> PlanError:
        """A problem, and whose it is."""
        return PlanError(f"{self.policy_name}, {type(self.module).__name__} {self.name or '(the model)'}: {problem}")

    def tensor(self, layer: Layer, leaf: str) -> Found | None:
        """The weight or the bias of a layer; None where the block may lack it, and does.

        Raises:
            PlanError: if it is not there, or no parameter of a plain module.
        """
        path = layer.paths[leaf]
        found = self._find(path)
        if found is None or found.thing is None:
            if layer.ignore_checker:
                return None
            raise self.error(f"has no {leaf} {path!r}; ignore_checker=True is for what blocks may lack")
        if not isinstance(found.thing, nn.Parameter) or not isinstance(found.owner, nn.Module):
            raise self.error(f"{path!r} is a {type(found.thing).__name__}, not a parameter of a module")
        if isinstance(found.owner, ParallelModule):
            raise self.error(f"{path!r} is split already; load the plain model to split it otherwise")
        return found

    def attribute(self, path: str) -> Found | None:
        """An attribute to be set; None where it is of a module that the block may lack, and does.

        One of a module's config is found as ``config.`` and its name, of the module.

        Raises:
            PlanError: if it is not there, or can be set for no module alone.
        """
        found = self._find(path)
        if found is None:
            if self._may_lack(path.rpartition(".")[0]):
                return None
            raise self.error(f"has no attribute {path!r}, which replace_arguments sets")
        if isinstance(found.thing, (Tensor, nn.Module)):
            raise self.error(f"attribute {path!r}: replace_arguments cannot set a {type(found.thing).__name__}")
        if isinstance(found.owner, nn.Module):
            return found
        own = f"config.{found.last}"
        above = path.removesuffix(own)
        module = self.module if not above else self._find(above.removesuffix(".")).thing  # type: ignore[union-attr]
        if above == path or not isinstance(module, nn.Module):
            raise self.error(f"attribute {path!r} is one of a {type(found.owner).__name__}, which others may share")
        return found._replace(owner=module, last=own)

    def _may_lack(self, module_path: str) -> bool:
        """Whether a module is absent, as layers in it may be."""
        paths = [path for _, layer in self.layers if layer.ignore_checker for path in layer.paths.values()]
        is_named = any(path.startswith(f"{module_path}.") for path in paths)
        return is_named and self._find(module_path) is None

    def _find(self, path: str) -> Found | None:
        """What stands at the end of a path; None if there is nothing."""
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise self.error(f"{path!r:.80} is no path: names with a dot between, and [number] into lists")
        names = [self.name] if self.name else []
        owner: Any = None
        found: Any = self.module
        for attribute, index in _STEP.findall(path):
            owner = found
            try:
                last = attribute or str(range(len(found))[int(index)])
                found = getattr(found, attribute) if attribute else found[int(last)]
            except (AttributeError, IndexError, TypeError):
                return None
            names.append(last)
        return Found(owner, names[-1], ".".join(names), found)
