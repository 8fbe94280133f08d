"""Paths of a policy in a module that it matches, such as ``attention.layers[0].weight``.

Owns how a path is parsed and resolved, and which missing layers a policy allows.
"""

import re
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardconv.layers.parallel_module import ParallelModule
from shardconv.policies.policy import STYLE_OF, Layer, Policy
from shardconv.support.errors import PlanError

_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_PATH = re.compile(rf"(?:{_STEP.pattern})(?:\.[^.\[\]]+|\[-?\d+\])*")


class _PathTarget(NamedTuple):
    """The value at the end of a path.

    Attributes:
        owner: the object or list that holds it.
        key: its attribute name or index there.
        name: its name in the model.
        value: the value.
    """

    owner: object
    key: str
    name: str
    value: object


class ParameterTarget(NamedTuple):
    """The parameter at the end of a path.

    Attributes:
        owner: the module that holds it.
        key: its name there.
        name: its name in the model.
        value: the parameter.
    """

    owner: nn.Module
    key: str
    name: str
    value: nn.Parameter


class AttributeTarget(NamedTuple):
    """The attribute at the end of a path.

    Attributes:
        module: the module that holds it.
        name: its name there; ``config.FIELD`` for a field of the module's config.
        value: its value.
    """

    module: nn.Module
    name: str
    value: object


class MatchedModule:
    """A module that a policy matches, and the lookup of its layers and attributes.

    Args:
        policy: the policy's class.
        name: the module's name in the model.
        module: the module, of exactly the class that the policy is for.

    Raises:
        PlanError: if the policy lists anything but layers.
    """

    def __init__(self, policy: type[Policy], name: str, module: nn.Module) -> None:
        self.name, self.module, self.policy = name, module, policy(module)
        self.policy_name = policy.__name__
        self.layers = [(style, layer) for role, style in STYLE_OF.items() for layer in getattr(self.policy, role)()]
        if wrong := next((layer for _, layer in self.layers if not isinstance(layer, Layer)), None):
            raise self.error(f"{wrong!r:.80} is not a shardconv.Layer")

    def error(self, problem: str) -> PlanError:
        """Make an error that names the policy and the module."""
        return PlanError(f"{self.policy_name}, {type(self.module).__name__} {self.name or '(the model)'}: {problem}")

    def tensor(self, layer: Layer, leaf: str) -> ParameterTarget | None:
        """Find the weight or the bias of a layer; None if it is missing and the policy allows that.

        Raises:
            PlanError: if it is missing, or is not a parameter of an unsharded module.
        """
        path = layer.paths[leaf]
        found = self._find(path)
        if found is None or found.value is None:
            if layer.ignore_checker:
                return None
            raise self.error(f"{leaf} {path!r} does not exist: correct the path, or pass ignore_checker=True")
        if not isinstance(found.value, nn.Parameter) or not isinstance(found.owner, nn.Module):
            raise self.error(f"{path!r} is a {type(found.value).__name__}, not a parameter of a module")
        if isinstance(found.owner, ParallelModule):
            raise self.error(f"{path!r} is already sharded: load the unsharded model to shard it otherwise")
        return ParameterTarget(found.owner, found.key, found.name, found.value)

    def attribute(self, path: str) -> AttributeTarget | None:
        """Find an attribute to set; None if its module is missing and the policy allows that.

        Raises:
            PlanError: if it is missing, or belongs to an object that several modules may share.
        """
        found = self._find(path)
        if found is None:
            if self._is_optional(path.rpartition(".")[0]):
                return None
            raise self.error(f"attribute {path!r}, which replace_arguments sets, does not exist")
        if isinstance(found.value, (Tensor, nn.Module)):
            raise self.error(f"attribute {path!r}: replace_arguments cannot set a {type(found.value).__name__}")
        if isinstance(found.owner, nn.Module):
            return AttributeTarget(found.owner, found.key, found.value)
        own = f"config.{found.key}"
        above = path.removesuffix(own)
        holder = self._find(above.removesuffix(".")) if above else None
        module = self.module if holder is None else holder.value
        if above == path or not isinstance(module, nn.Module):
            raise self.error(f"attribute {path!r} is one of a {type(found.owner).__name__}, which others may share")
        return AttributeTarget(module, own, found.value)

    def _is_optional(self, module_path: str) -> bool:
        """Whether a module is missing that a policy names in optional layers only."""
        paths = [path for _, layer in self.layers if layer.ignore_checker for path in layer.paths.values()]
        is_named = any(path.startswith(f"{module_path}.") for path in paths)
        return is_named and self._find(module_path) is None

    def _find(self, path: str) -> _PathTarget | None:
        """Find the value at the end of a path; None if there is none."""
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise self.error(f"{path!r:.80} is not a path (expected names separated by dots, and [number] for lists)")
        names = [self.name] if self.name else []
        owner: object = None
        found: Any = self.module  # an object of the model, of any type
        for attribute, index in _STEP.findall(path):
            owner = found
            try:
                last = attribute or str(range(len(found))[int(index)])
                found = getattr(found, attribute) if attribute else found[int(last)]
            except (AttributeError, IndexError, TypeError):
                return None
            names.append(last)
        return _PathTarget(owner, names[-1], ".".join(names), found)
