"""The tensors of a source, in memory: of an unsharded checkpoint in any format."""

from safetensors.torch import load
from torch import Tensor

from shardconv.checkpoint.engine.copy import Reader, Scratch, Span, StripeState
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_reader import open_tensors
from shardconv.files.containers.safetensors import Header


def load_source(source: Source) -> dict[str, Tensor]:
    """Load the tensors of a source into memory.

    Raises:
        SourceError: if a file was changed since the source was opened.
    """
    reader, files = open_tensors(source, source.specs, None)
    numbers = {name: number for number, name in enumerate(source.specs)}
    tensors: dict[str, Tensor] = {}
    with files:
        for file in source.files:
            tensors |= load(_file_bytes(file.header, reader, numbers))
        files.check_unchanged()
    return tensors


def _file_bytes(header: Header, reader: Reader, numbers: dict[str, int]) -> bytes:
    """The safetensors file with this header."""
    content = bytearray(header.file_bytes)
    content[: header.data_offset] = header.prefix
    data, scratch = memoryview(content)[header.data_offset :], Scratch(len(content))
    for name, info in header.tensors.items():
        if info.num_bytes:
            span = Span(numbers[name], 0, info.num_bytes)
            reader.gather(StripeState(0), span, data[info.start : info.stop], scratch)
    return bytes(content)
