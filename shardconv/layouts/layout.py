"""A layout as data: the file tensors and constants of rank files, and the names of the files.

The manifest stores it whole, so that a split checkpoint is read without the rules that the layout was made from.
Knows nothing of bytes in files, model types or engines.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Self

from shardconv.errors import PlanError
from shardconv.layouts.dcp import first_unreadable, why_unreadable
from shardconv.plan.plan import Plan, TensorSpec

#: How the value of a constant is packed, by dtype. BF16 is the upper half of F32.
_PACKED = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B"}
#: Constants begin the data section; with a multiple of this many bytes, the tensors after them are aligned.
_ALIGNMENT = 8
#: The most bytes of all constants together.
_MAX_CONSTANT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a rank file: the rank's shards of one or more source tensors, concatenated.

    Attributes:
        name: its name in the file.
        members: names of the source tensors, in order.
        stack: E to stack the members into a tensor of shape (E, ...): the first ``len(members) / E`` of them are
            concatenated along dim 0 for index 0, and so on. 0 to concatenate all along dim 0.
        squeeze: whether dim 0 of its only member, of size 1, is left out.
    """

    name: str
    members: tuple[str, ...]
    stack: int = 0
    squeeze: bool = False

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape on a rank.

        Args:
            shapes: of the rank's shards of the members.

        Raises:
            PlanError: if shards of these shapes do not form one tensor.
        """
        if self.squeeze and (len(shapes) != 1 or self.stack or shapes[0][:1] != (1,)):
            raise PlanError(
                f"{self.name}: dim 0 of its only member cannot be left out "
                f"(got {_described(self.members, shapes)}, expected size 1): {REMEDY}"
            )
        if len(shapes) == 1 and not self.stack:
            return shapes[0][self.squeeze :]
        if len({shape[1:] for shape in shapes}) != 1 or not all(shapes):
            raise PlanError(
                f"{self.name}: its members have shards that cannot be concatenated along dim 0 "
                f"(got {_described(self.members, shapes)}, expected equal sizes of all other dims): {REMEDY}"
            )
        each = len(shapes) // (self.stack or 1)
        rows = [sum(shape[0] for shape in shapes[at : at + each]) for at in range(0, len(shapes), each)]
        if len(set(rows)) != 1:
            raise PlanError(
                f"{self.name}: its members have shards that cannot be stacked "
                f"(got {_described(self.members, shapes)}, expected equal shapes): {REMEDY}"
            )
        return (*([self.stack] if self.stack else []), rows[0], *shapes[0][1:])


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor of every rank file that no source tensor gives.

    Attributes:
        name: its name in the files.
        dtype: as safetensors names it.
        shape: its shape.
        value: of every element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: float

    @property
    def data(self) -> bytes:
        """Its bytes.

        Raises:
            ValueError: if the dtype does not hold the value, or no constant has this dtype.
        """
        try:
            is_half = self.dtype == "BF16"
            element = struct.pack("<f" if is_half else _PACKED[self.dtype], self.value)
        except (KeyError, struct.error, OverflowError) as error:
            raise ValueError(f"{self.name}: {self.value!r:.40} is not a value of dtype {self.dtype:.20}") from error
        count = 1
        for size in self.shape:
            count *= size
            if not 0 <= count * len(element) <= _MAX_CONSTANT_BYTES:
                raise ValueError(f"{self.name}: a constant does not have shape {list(self.shape[:8])}")
        return element[2 if is_half else 0 :] * count


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Which tensors the rank files of a split checkpoint hold, and in which files.

    Attributes:
        name: of the layout.
        file_name: of a rank file, with ``{rank}``; ``{padded_rank}`` has as many digits as the last rank.
        engine: the engine that reads the files; None where none is named.
        versions: the versions of the engine that do.
        has_offsets: whether the metadata of each file has the offsets of its shards, for torch.distributed.checkpoint.
        changed: the file tensors that are not one source tensor under its own name.
        constants: the tensors that each rank file begins with.
        padded_to: names of file tensors whose rows on all ranks together are padded to a multiple of a number.
    """

    name: str
    file_name: str
    engine: str | None = None
    versions: str | None = None
    has_offsets: bool = False
    changed: tuple[FileTensor, ...] = ()
    constants: tuple[Constant, ...] = ()
    padded_to: Mapping[str, int] = field(default_factory=dict)

    def rank_file(self, rank: int, tp: int) -> str:
        """The name of a rank's file."""
        padded = f"{rank:0{len(str(tp - 1))}}"
        named = self.file_name.replace("{padded_rank}", padded).replace("{rank}", str(rank))
        return named.replace("{tp}", str(tp))

    def file_tensors(self, names: Iterable[str]) -> list[FileTensor]:
        """The tensors of a rank file without the constants, in the order of their first members.

        Args:
            names: of the source tensors, in order.
        """
        by_first = {tensor.members[0]: tensor for tensor in self.changed}
        behind = {member for tensor in self.changed for member in tensor.members[1:]}
        return [by_first.get(name) or FileTensor(name, (name,)) for name in names if name not in behind]

    def check(self, tensors: Mapping[str, TensorSpec], plan: Plan) -> None:
        """Check that the layout fits a checkpoint and its plan.

        Raises:
            PlanError: if a tensor has no place or two, members differ in dtype, or a placement is not the layout's.
            ValueError: if a constant is invalid.
        """
        if self.has_offsets and (name := first_unreadable(plan, tensors)) is not None:
            raise PlanError(why_unreadable(name, plan.placement(name)))
        if not self.changed and not self.constants and not self.padded_to:
            return
        if self.has_offsets:
            raise PlanError(f"layout {self.name}: offsets are of tensors under their own names only")
        self._check_members(tensors)
        self._check_names(tensors)
        num_bytes = 0
        for constant in self.constants:
            num_bytes += len(constant.data)
            if num_bytes > _MAX_CONSTANT_BYTES:
                raise PlanError(f"layout {self.name}: its constants have more than {_MAX_CONSTANT_BYTES} bytes")
        if num_bytes % _ALIGNMENT:
            raise PlanError(f"layout {self.name}: its constants have {num_bytes} bytes, which is not a multiple of 8")
        for tensor in self.changed:
            rows = sum(sum(tensors[member].shape[:1]) for member in tensor.members)
            self._check_padding(tensor, rows, plan)
        for name in self.padded_to.keys() & tensors.keys():
            self._check_padding(FileTensor(name, (name,)), sum(tensors[name].shape[:1]), plan)

    def _check_members(self, tensors: Mapping[str, TensorSpec]) -> None:
        counts = Counter(chain.from_iterable(tensor.members for tensor in self.changed))
        wrong = next((name for name, count in counts.items() if count > 1 or name not in tensors), None)
        if wrong is not None:
            raise PlanError(f"{wrong}: layout {self.name} has {counts[wrong]} places for it (expected one)")
        for tensor in self.changed:
            if not tensor.members or tensor.stack < 0 or len(tensor.members) % (tensor.stack or 1):
                raise PlanError(f"{tensor.name}: cannot be {len(tensor.members)} tensors, stacked {tensor.stack} high")
            dtypes = {tensors[member].dtype: member for member in reversed(tensor.members)}
            if len(dtypes) > 1:
                found = ", ".join(f"{member} of {dtype}" for dtype, member in reversed(dtypes.items()))
                raise PlanError(f"{tensor.name}: its members have several dtypes (got {found}, expected one): {REMEDY}")

    def _check_names(self, tensors: Mapping[str, TensorSpec]) -> None:
        names = [tensor.name for tensor in self.file_tensors(tensors)] + [one.name for one in self.constants]
        ((name, count),) = Counter([*names, "__metadata__"]).most_common(1)
        if count > 1:
            raise PlanError(f"{name}: layout {self.name} has {count} tensors of this name (expected one): {REMEDY}")

    def _check_padding(self, tensor: FileTensor, rows: int, plan: Plan) -> None:
        """Check that all ranks together have the rows of a tensor, padded to a multiple; ``rows`` are the source's."""
        if (multiple := self.padded_to.get(tensor.name)) is None:
            return
        expected = -(-rows // multiple) * multiple
        placements = [plan.placement(member) for member in tensor.members]
        found = [sum(placement.local_size(rank) for placement in placements) for rank in range(plan.tp)]
        if {rows_of_rank * plan.tp for rows_of_rank in found} != {expected}:
            raise PlanError(
                f"{tensor.name}: layout {self.name} pads its {rows} rows to {expected} and shards them evenly over "
                f"{plan.tp} ranks (got shards of {', '.join(map(str, sorted(set(found))))} rows): {REMEDY}"
            )

    def to_json(self, names: Iterable[str]) -> dict[str, Any]:
        """Plain data; source tensors are numbers, in the order of ``names``."""
        number = {name: at for at, name in enumerate(names)}
        alike = groupby(self.constants, key=lambda one: (one.dtype, one.shape, one.value))
        return {
            "name": self.name,
            "file_name": self.file_name,
            "engine": self.engine,
            "versions": self.versions,
            "has_offsets": self.has_offsets,
            "tensors": [
                {
                    "name": one.name,
                    "members": [number[member] for member in one.members],
                    "stack": one.stack,
                    **({"squeeze": True} if one.squeeze else {}),
                }
                for one in self.changed
            ],
            "constants": [
                {"dtype": dtype, "shape": list(shape), "value": value, "names": [one.name for one in constants]}
                for (dtype, shape, value), constants in alike
            ],
            "padded_to": dict(self.padded_to),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], names: Iterable[str]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a layout of tensors with these names.
        """
        name_of = dict(enumerate(names))
        try:
            changed = tuple(
                FileTensor(
                    one["name"],
                    tuple(name_of[at] for at in one["members"]),
                    one["stack"],
                    squeeze=_flag(one.get("squeeze", False)),
                )
                for one in data["tensors"]
            )
        except KeyError as error:
            raise ValueError(f"its layout is of a tensor {error} that it does not have") from error
        constants = tuple(
            Constant(name, one["dtype"], tuple(one["shape"]), one["value"])
            for one in data["constants"]
            for name in one["names"]
        )
        if any(multiple < 1 for multiple in data["padded_to"].values()) or not all(one.members for one in changed):
            raise ValueError("its layout has an empty tensor")
        return cls(
            data["name"], data["file_name"], data["engine"], data["versions"], data["has_offsets"], changed, constants,
            data["padded_to"],
        )  # fmt: skip


def _flag(value: Any) -> bool:  # noqa: ANN401 - anything JSON holds
    if type(value) is not bool:
        raise ValueError(f"squeeze is {value!r:.40} (expected true or false)")
    return value


def _described(members: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    first = dict(zip(reversed(shapes), reversed(members), strict=True))
    return ", ".join(f"{list(shape)} of {member}" for shape, member in list(first.items())[:3])


#: What users can do with a checkpoint that does not fit an engine's layout.
REMEDY = "use the native layout (--for vllm in place of --layout vllm), and serve it with --load-format shardconv"

#: Each source tensor under its own name; with the offsets of the shards, torch's reader of rank files.
NATIVE = FileLayout("native", "rank-{padded_rank}-of-{tp}.safetensors")
DCP = FileLayout("dcp", "rank-{padded_rank}-of-{tp}.safetensors", has_offsets=True)
