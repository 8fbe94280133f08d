"""Schemes: the formats of the layers of a checkpoint, and the layers that each is for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic

from shardconv.formats import patterns
from shardconv.formats.format import Format
from shardconv.formats.patterns import matches

#: Elements and entries of a block.
Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of some layers, with its sizes.

    Attributes:
        format: the format.
        blocks: name of a block in ``formats.toml`` to its elements and entries; a group of 0 elements is a whole row.
        strategy: of the scales, a key of :data:`~shardconv.formats.format.SCALE_DIMS`; "" if shapes show it.
        is_symmetric: whether the quantization is symmetric: without zero points.
        has_act_order: whether groups are in the order of activations: not of consecutive input features.
        targets: names or patterns (``re:``) of layers, or ``Linear`` for all.
        block_sizes: name of a logical matrix to the elements of a block with one scale, for each dim, where every
            matrix has its own; a block of the size of a dim is one block whatever the size of the shard.
    """

    format: Format
    blocks: Mapping[str, Block] = field(default_factory=dict)
    strategy: str = ""
    is_symmetric: bool = True
    has_act_order: bool = False
    targets: tuple[str, ...] = ("Linear",)
    block_sizes: Mapping[str, tuple[int, ...]] | None = None

    def layer(self, name: str) -> str:
        """The name of the layer whose values a tensor of this name holds."""
        return name.removesuffix(self.format.suffix).removesuffix(".weight").rstrip("._")

    def rank(self, layer: str, deadline: float) -> tuple[int, str] | None:
        """How closely the targets name a layer, as ``match_targets`` of compressed-tensors sorts them.

        Args:
            layer: name of the layer.
            deadline: that of the settings.

        Returns:
            The kind of the closest target, 0 for a name, 1 for a pattern and 2 for a class, and the target; None if no
            target names the layer.
        """
        found = [target for target in self.targets if target == "Linear" or matches(target, layer, deadline)]
        kinds = [2 if target == "Linear" else int(target.startswith("re:")) for target in found]
        return min(zip(kinds, found, strict=True), default=None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The quantization settings of a checkpoint.

    Attributes:
        method: ``quant_method``.
        schemes: the formats of its layers. The one whose targets name a layer most closely counts; among equals that of
            which the fewest tensors are missing, and then the first.
        ignored: names of layers that are not quantized, or parts of names between dots.
        ignored_patterns: patterns of such layers.
        deadline: when the patterns must have been matched, on the clock of :func:`time.monotonic`.
    """

    method: str
    schemes: tuple[Scheme, ...]
    ignored: frozenset[str] = frozenset()
    ignored_patterns: tuple[str, ...] = ()
    deadline: float = field(default_factory=lambda: monotonic() + patterns.MAX_SECONDS)

    def closest(self, layer: str, schemes: Iterable[Scheme]) -> list[Scheme]:
        """Those of some schemes whose targets name a layer most closely; empty if none names it."""
        ranked = [(rank, scheme) for scheme in schemes if (rank := scheme.rank(layer, self.deadline))]
        best = min((rank for rank, _ in ranked), default=None)
        return [scheme for rank, scheme in ranked if rank == best]

    def ignoring(self, layer: str) -> str | None:
        """The name or pattern that leaves a layer unquantized; None if there is none."""
        parts = layer.split(".")
        ends = range(1, len(parts) + 1) if self.ignored else ()
        paths = (".".join(parts[first:last]) for last in ends for first in range(last))
        found = next((path for path in paths if path in self.ignored), None)  # lists can have hundreds of names
        return found or next(
            (pattern for pattern in self.ignored_patterns if matches(pattern, layer, self.deadline)), None
        )
