"""The local tensor of a DTensor that is several chunks of the full one, not one.

Owns what ``torch.distributed.checkpoint`` asks of such a tensor: which chunks there are, and the memory of each. Knows
nothing of layers and placements.

It stands where torch has ``torch.distributed.tensor._shards_wrapper.LocalShardsWrapper``, which has the same three
methods, but takes only tensors of one and two dims, wants a chunk on every rank, and lets ``full_tensor`` put chunks
together in the wrong order. This one computes nothing at all: an operation on it is refused.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(NamedTuple):
    """A box out of a full tensor.

    Attributes:
        offsets: where it begins in the full tensor, one number a dim.
        values: its elements: a view of the memory in which they are.
    """

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """The box, as a checkpoint names it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.shape)

    def new_empty(self, device: Any) -> Self:
        """The same box in new memory."""
        return self._replace(values=torch.empty_like(self.values, device=device))


class ChunkedShard(Tensor):
    """A rank's shard of a tensor, as chunks of the full tensor; the local tensor of a DTensor.

    Args:
        shard: [*], of the shape, dtype and device of the shard.
        chunks: those of the rank; there may be none.
        device: of the chunks, if it is not the shard's.
    """

    chunks: tuple[Chunk, ...]

    def __new__(cls, shard: Tensor, chunks: Iterable[Chunk], device: Any = None) -> Self:
        """See the class."""
        # torch has no public way to make a tensor without memory of its own
        self: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=device or shard.device
        )
        self.chunks = tuple(chunks)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only what gives it another name, and the memory into which torch copies it for an asynchronous save.

        Raises:
            NotImplementedError: for any other operation.
        """
        if func in _RENAMING:
            return cls(args[0], args[0].chunks)
        if func is torch.ops.aten.new_empty.default:
            device = kwargs.get("device")
            return cls(args[0], (chunk.new_empty(device) for chunk in args[0].chunks), device)
        raise NotImplementedError(
            f"{func}: this rank holds several chunks of the full tensor, or zeros beside them, which no placement of "
            f"DTensor says: such a DTensor can be saved and loaded by torch.distributed.checkpoint only. To compute "
            f"with full tensors use shardconv.gather_state_dict(module)"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ChunkedShard({[(chunk.offsets, tuple(chunk.values.shape)) for chunk in self.chunks]})"

    # --- what torch.distributed.checkpoint asks ---

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What is to be written: each chunk.

        Args:
            fqn: the name of the tensor.
            object: the DTensor around this.
        """
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk.metadata, TensorProperties.create_from_tensor(chunk.values), object.size()
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What is to be read: the place of each chunk."""
        return [chunk.metadata for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of a chunk, to write from or to read into.

        Raises:
            ValueError: if the rank has no such chunk.
        """
        for chunk in self.chunks:
            if torch.Size(chunk.offsets) == index.offset:
                return chunk.values
        raise ValueError(f"{index.fqn}: this rank has no chunk at {index.offset}, only {self!r}")


_RENAMING = {torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
