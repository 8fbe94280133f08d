"""Local tensor of a DTensor that consists of several chunks of the full tensor.

Implements the interface that ``torch.distributed.checkpoint`` uses to save and load the chunks. It replaces torch's
``torch.distributed.tensor._shards_wrapper.LocalShardsWrapper``, which supports only one and two dims, requires a chunk
on every rank, and lets ``full_tensor`` concatenate chunks in the wrong order. This class does not support computation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(NamedTuple):
    """A rectangular chunk of a full tensor.

    Attributes:
        offsets: start of the chunk in the full tensor, per dim.
        values: elements of the chunk; a view of the shard.
    """

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """Offsets and sizes in the format of torch's distributed checkpoints."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.shape)

    def new_empty(self, device: torch.device | None) -> Self:
        """Return the same chunk with uninitialized memory."""
        return self._replace(values=torch.empty_like(self.values, device=device))


class ChunkedShard(Tensor):
    """Shard of a tensor as a list of chunks of the full tensor, for use as the local tensor of a DTensor.

    Args:
        shard: [*], tensor with the shape, dtype and device of the shard.
        chunks: chunks of this rank; may be empty.
        device: device of the chunks, if it differs from that of ``shard``.
    """

    chunks: tuple[Chunk, ...]

    def __new__(cls, shard: Tensor, chunks: Iterable[Chunk], device: torch.device | None = None) -> Self:
        """Create a shard; see the class for the arguments."""
        # the only way to create a tensor without storage; torch does not export it
        self: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=device or shard.device
        )
        self.chunks = tuple(chunks)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch documents it
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple["ChunkedShard", ...] = (),
        kwargs: Mapping[str, torch.device | None] = MappingProxyType({}),
    ) -> "ChunkedShard":
        """Support aliasing, and allocation for asynchronous saves.

        Raises:
            NotImplementedError: for any other operation.
        """
        if func in _ALIASING:
            return cls(args[0], args[0].chunks)
        if func is torch.ops.aten.new_empty.default:
            device = kwargs.get("device")
            return cls(args[0], (chunk.new_empty(device) for chunk in args[0].chunks), device)
        raise NotImplementedError(
            f"{func} is not supported: this rank holds several chunks of the full tensor, or padding, which DTensor "
            f"placements cannot describe. Use this DTensor with torch.distributed.checkpoint only; for full tensors "
            f"call shardconv.gather_state_dict(module)"
        )

    def __repr__(self) -> str:  # type: ignore[override] # torch's has an argument for its own use
        return f"ChunkedShard({[(chunk.offsets, tuple(chunk.values.shape)) for chunk in self.chunks]})"

    # --- interface of torch.distributed.checkpoint ---

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:
        """Return one write item per chunk.

        Args:
            fqn: name of the tensor.
            object: DTensor that contains this shard.
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
        """Return the offsets and sizes of the chunks to read."""
        return [chunk.metadata for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a chunk, to save from or load into.

        Raises:
            ValueError: if this rank does not have the chunk.
        """
        for chunk in self.chunks:
            if torch.Size(chunk.offsets) == index.offset:
                return chunk.values
        raise ValueError(f"{index.fqn}: this rank does not have a chunk at offset {index.offset} (got {self!r})")


_ALIASING = {torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
