"""A layout as data: the file tensors and constants of rank files, and the names of the files.

The manifest stores the complete layout, so a split checkpoint is read without the rules of the layout.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated

from msgspec import Meta

from shardconv.plan.grid import PLAIN
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import PlanError, option
from shardconv.support.structs import Data

#: ``struct`` formats of constants, by dtype. BF16 is the upper half of F32.
_PACKED = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B"}
#: Bytes of all constants are a multiple of this, so the tensors after them are aligned.
_ALIGNMENT = 8
#: Maximum bytes of all constants together.
_MAX_CONSTANT_BYTES = 2**20

Positive = Annotated[int, Meta(ge=1)]


class FileTensor(Data, frozen=True):
    """A tensor of a rank file: the rank's shards of one or more source tensors, concatenated.

    Attributes:
        name: its name in the file.
        members: names of the source tensors, in order.
        stack: E to stack the members into a tensor of shape (E, ...): the first ``len(members) / E`` of them are
            concatenated for index 0, and so on. 0 to concatenate all.
        squeeze: whether to remove dim 0, of size 1, of its only member.
        is_vector: whether its members are numbers, of shape () or (1,), which form a vector; with ``stack``, a vector
            of E numbers or a matrix of E rows.
        implied: names of further source tensors, which are not in the file, as their values follow from their grids.
        dim: the dim of the members along which they are concatenated.
        is_head: whether it is a head that is tied to the embedding, its only member. On pipeline stages without the
            head, it has the name of the embedding.
    """

    name: str
    members: Annotated[tuple[str, ...], Meta(min_length=1)]
    stack: int = 0
    squeeze: bool = False
    is_vector: bool = False
    implied: tuple[str, ...] = ()
    dim: int = 0
    is_head: bool = False

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape on a rank.

        Args:
            shapes: of the rank's shards of the members.

        Raises:
            PlanError: if shards of these shapes do not form one tensor.
        """
        if self.squeeze and (len(shapes) != 1 or self.stack or shapes[0][:1] != (1,)):
            raise PlanError(
                f"{self.name}: dim 0 of its only member cannot be removed "
                f"(got {_described(self.members, shapes)}, expected size 1): {REMEDY}"
            )
        if self.is_vector:
            return self._vector(shapes)
        if len(shapes) == 1 and not self.stack:
            return shapes[0][self.squeeze :]
        dim = self.dim
        if len({(shape[:dim], shape[dim + 1 :]) for shape in shapes}) != 1 or len(shapes[0]) <= dim:
            raise PlanError(
                f"{self.name}: the shards of its members cannot be concatenated along dim {dim} "
                f"(got {_described(self.members, shapes)}, expected equal sizes of all other dims): {REMEDY}"
            )
        step = len(shapes) // (self.stack or 1)
        sizes = [sum(shape[dim] for shape in shapes[at : at + step]) for at in range(0, len(shapes), step)]
        if len(set(sizes)) != 1:
            raise PlanError(
                f"{self.name}: the shards of its members cannot be stacked "
                f"(got {_described(self.members, shapes)}, expected equal shapes): {REMEDY}"
            )
        return (*([self.stack] if self.stack else []), *shapes[0][:dim], sizes[0], *shapes[0][dim + 1 :])

    def _vector(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        if not set(shapes) <= {(), (1,)} or self.squeeze:
            raise PlanError(
                f"{self.name}: its members are not numbers (got {_described(self.members, shapes)}, expected shapes () "
                f"or (1,)): {REMEDY}"
            )
        columns = len(shapes) // (self.stack or 1)
        return (self.stack, columns) if self.stack and columns > 1 else (len(shapes),)


class Constant(Data, frozen=True):
    """A tensor with a constant value in every rank file, without a source tensor.

    Attributes:
        name: its name in the files.
        dtype: its dtype in safetensors.
        shape: its shape.
        value: of every element.
        beside: name of the file tensor that it belongs to: a pipeline stage has both or neither.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: int | float
    beside: str = ""

    @property
    def data(self) -> bytes:
        """Its bytes.

        Raises:
            ValueError: if the value is not valid for the dtype, or the dtype or shape is not supported.
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
                raise ValueError(f"{self.name}: shape {list(self.shape[:8])} is not valid for a constant")
        return element[2 if is_half else 0 :] * count


class FileLayout(Data, frozen=True):
    """The tensors of the rank files of a split checkpoint, and the names of the files.

    Attributes:
        name: of the layout.
        file_name: of a rank file, with ``{rank}``; ``{padded_rank}`` has as many digits as the last rank. ``{ranks}``
            is the number of ranks, ``{file}`` the number of a file of the rank; without it, the number is inserted if
            the rank has several files.
        file_name_in_stage: the name with several pipeline stages, with ``{stage}`` and ``{tp_rank}``, the rank in its
            stage; "" for the same name.
        engine: the engine that reads the files, or None.
        versions: the engine versions that read them, or None.
        has_offsets: whether the metadata of each file has the offsets of its shards, for torch.distributed.checkpoint.
        changed: the file tensors that differ from a source tensor in name or contents.
        constants: the first tensors of each rank file.
        padded_to: name of a file tensor to the multiple that its rows on all ranks together are padded to.
        max_file_bytes: maximum bytes of a file with several tensors; None for one file per rank.
    """

    name: str
    file_name: str
    file_name_in_stage: str = ""
    engine: str | None = None
    versions: str | None = None
    has_offsets: bool = False
    changed: tuple[FileTensor, ...] = ()
    constants: tuple[Constant, ...] = ()
    padded_to: Mapping[str, Positive] = {}
    max_file_bytes: Positive | None = None

    def rank_file(self, rank: int, per_stage: int, file: int = 0, count: int = 1, pp: int = 1) -> str:
        """The name of one of the ``count`` files of one of the ranks of ``pp`` stages."""
        name = (self.file_name_in_stage if pp > 1 else "") or self.file_name
        if count > 1 and "{file}" not in name:
            name = name.replace(".safetensors", "-file-{padded_file}-of-{count}.safetensors")
        (stage, tp_rank), ranks = divmod(rank, per_stage), per_stage * pp
        numbers = {"rank": (rank, ranks), "file": (file, count), "stage": (stage, pp), "tp_rank": (tp_rank, per_stage)}
        for key, (number, of) in numbers.items():
            name = name.replace(f"{{padded_{key}}}", f"{number:0{len(str(of - 1))}}").replace(f"{{{key}}}", str(number))
        return name.replace("{ranks}", str(ranks)).replace("{count}", str(count))

    def file_tensors(self, names: Iterable[str]) -> list[FileTensor]:
        """The tensors of a rank file without the constants, in the order of their first members.

        Args:
            names: of the source tensors, in order.
        """
        by_first = {tensor.members[0]: tensor for tensor in self.changed}
        later = {member for tensor in self.changed for member in (*tensor.members[1:], *tensor.implied)}
        return [by_first.get(name) or FileTensor(name, (name,)) for name in names if name not in later]

    def check(self, tensors: Mapping[str, TensorSpec], plan: Plan) -> None:
        """Check that the layout fits a checkpoint and its plan.

        Raises:
            PlanError: if a tensor is missing or in two file tensors, members differ in dtype, or the layout does not
                support a placement.
            ValueError: if a constant is invalid.
        """
        if self.has_offsets:
            _check_offsets(tensors, plan)
        if not self.changed and not self.constants and not self.padded_to:
            return
        if self.has_offsets:
            raise PlanError(f"layout {self.name}: offsets require the names and shapes of the source tensors")
        self._check_members(tensors, plan)
        names = self._check_names(tensors)
        num_bytes = 0
        for constant in self.constants:
            num_bytes += len(constant.data)
            if num_bytes > _MAX_CONSTANT_BYTES:
                raise PlanError(f"layout {self.name}: its constants have more than {_MAX_CONSTANT_BYTES} bytes")
            if constant.beside not in names:
                raise PlanError(f"{constant.name}: layout {self.name} does not have {constant.beside:.200} beside it")
        if num_bytes % _ALIGNMENT:
            raise PlanError(f"layout {self.name}: its constants have {num_bytes} bytes, which is not a multiple of 8")
        for tensor in self.changed:
            rows = sum(sum(tensors[member].shape[:1]) for member in tensor.members)
            self._check_padding(tensor, rows, plan)
        for name in self.padded_to.keys() & tensors.keys():
            self._check_padding(FileTensor(name, (name,)), sum(tensors[name].shape[:1]), plan)

    @property
    def implied(self) -> frozenset[str]:
        """Names of the source tensors that are in no file."""
        return frozenset(name for tensor in self.changed for name in tensor.implied)

    def _check_members(self, tensors: Mapping[str, TensorSpec], plan: Plan) -> None:
        counts = Counter(chain.from_iterable((*tensor.members, *tensor.implied) for tensor in self.changed))
        wrong = next((name for name, count in counts.items() if count > 1 or name not in tensors), None)
        if wrong is not None:
            raise PlanError(
                f"{wrong}: layout {self.name} has it in {counts[wrong]} tensors (expected one source tensor)"
            )
        for tensor in self.changed:
            if not tensor.members or tensor.stack < 0 or len(tensor.members) % (tensor.stack or 1):
                raise PlanError(f"{tensor.name}: {len(tensor.members)} members cannot be stacked to {tensor.stack}")
            if tensor.dim < 0 or (tensor.dim and (tensor.squeeze or tensor.is_vector)):
                raise PlanError(f"{tensor.name}: its members cannot be concatenated along dim {tensor.dim}")
            for name in tensor.implied:
                if (grid := plan.tensors[name].grid) is None or grid.content == PLAIN:
                    raise PlanError(
                        f"{name}: layout {self.name} leaves out its values, and they do not follow from the "
                        f"quantization settings (act-order): use the native layout to run it with shardconv, or "
                        f"quantize it again without act-order (desc_act)"
                    )
            dtypes = {tensors[member].dtype: member for member in reversed(tensor.members)}
            if len(dtypes) > 1:
                got = ", ".join(f"{member} of {dtype}" for dtype, member in reversed(dtypes.items()))
                raise PlanError(f"{tensor.name}: its members have several dtypes (got {got}, expected one): {REMEDY}")

    def _check_names(self, tensors: Mapping[str, TensorSpec]) -> set[str]:
        """Check the names in a file, and return those of the file tensors."""
        names = [tensor.name for tensor in self.file_tensors(tensors)]
        all_names = [*names, *(constant.name for constant in self.constants), "__metadata__"]
        ((name, count),) = Counter(all_names).most_common(1)
        if count > 1:
            raise PlanError(f"{name}: layout {self.name} has {count} tensors of this name (expected one): {REMEDY}")
        return {*names}

    def _check_padding(self, tensor: FileTensor, rows: int, plan: Plan) -> None:
        """Check that all ranks together have the ``rows`` of the source tensors, padded to the required multiple."""
        if (multiple := self.padded_to.get(tensor.name)) is None:
            return
        expected = -(-rows // multiple) * multiple
        placements = [plan.placement(member) for member in tensor.members]
        local_rows = [sum(placement.local_size(rank) for placement in placements) for rank in range(plan.tp)]
        if {size * plan.tp for size in local_rows} != {expected}:
            raise PlanError(
                f"{tensor.name}: layout {self.name} pads its {rows} rows to {expected} and shards them evenly over "
                f"{plan.tp} ranks (got shards of {', '.join(map(str, sorted(set(local_rows))))} rows): {REMEDY}"
            )


def _check_offsets(names: Iterable[str], plan: Plan) -> None:
    """Check that each shard is one box: together they determine the full shape for torch.distributed.checkpoint."""
    for name in names:
        placement = plan.placement(name)
        if placement.is_padded or any(len(ranges) > 1 for ranges in placement.ranks):
            raise PlanError(
                f"{name}: is sharded as {placement.describe()}, but torch.distributed.checkpoint reads one interval "
                f"per rank, without padding. Replicate it ({option(replicate=[name])}), or use the native layout "
                f"({option(layout='native')}); for a checkpoint in torch's format, load the model and save "
                "shardconv.tensor.as_dtensor(model)"
            )


def _described(members: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    first = dict(zip(reversed(shapes), reversed(members), strict=True))
    return ", ".join(f"{list(shape)} of {member}" for shape, member in list(first.items())[:3])


#: The remedy for a checkpoint that an engine's layout does not support.
REMEDY = (
    f"use the native layout: vLLM serves it with {option(engine='vllm')} and --load-format shardconv, SGLang loads the "
    "source"
)

#: Layouts with the names of the source tensors; DCP adds the offsets of the shards for torch.distributed.checkpoint.
NATIVE = FileLayout("native", "rank-{padded_rank}-of-{ranks}.safetensors")
DCP = FileLayout("dcp", "rank-{padded_rank}-of-{ranks}.safetensors", has_offsets=True)
