"""Load the tokenizer of a checkpoint, and stream generated text. Does not import torch."""

from collections.abc import Callable
from typing import Any

from shardconv.files.folder import AnyPath, local_copy
from shardconv.files.weight_formats import is_weights
from shardconv.hf.package import import_transformers
from shardconv.support.errors import RunError, one_line

#: Files from which a tokenizer of any kind is read.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.*.json", "tekken.json", "*.model", "*.tiktoken", "vocab*", "*vocab.*")
_TOKENIZER_FILES = (*_VOCABULARY_FILES, "tokenizer_config.json")

_REMEDY = (
    "copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, ...) into the folder, pass token ids by "
    '--token-ids "1 2 3", or pass --check without a prompt'
)


def has_tokenizer(path: AnyPath) -> bool:
    """Whether a folder has any file of a tokenizer."""
    return any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES)


def check_tokenizer(path: AnyPath) -> None:
    """Refuse text if a folder does not have a tokenizer.

    Raises:
        RunError: if it does not.
    """
    if not has_tokenizer(path):
        raise RunError(f"{path}: does not have a tokenizer: {_REMEDY}")


def load_tokenizer(path: AnyPath, *, is_trusted: bool) -> Any:
    """Load the tokenizer of a folder.

    Args:
        path: the folder.
        is_trusted: whether code in the folder may be run.

    Raises:
        RunError: if the tokenizer is missing, cannot be loaded, or does not have a vocabulary.
        SourceError: if a remote file cannot be read.
    """
    check_tokenizer(path)
    auto_class = import_transformers().AutoTokenizer
    with local_copy(path, lambda name: not is_weights(name)) as local:
        try:
            tokenizer = auto_class.from_pretrained(local, trust_remote_code=is_trusted)
        except Exception as error:  # tokenizers raises Exception itself
            raise RunError(f"{path}: the tokenizer cannot be loaded (got {one_line(error)}): {_REMEDY}") from error
    names = [str(name) for name in getattr(tokenizer, "vocab_files_names", {}).values()]
    if names and not any(any(path.glob(pattern)) for pattern in (*_VOCABULARY_FILES, *names)):
        raise RunError(
            f"{path}: the tokenizer does not have a vocabulary (expected one of {', '.join(names)}): {_REMEDY}"
        )
    return tokenizer


def text_streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """A streamer for ``generate`` that passes on text as it is generated, without the prompt and special tokens.

    Args:
        tokenizer: decodes tokens.
        write: is called with each piece of text; the last one ends with a newline.
    """
    streamer = import_transformers().TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = lambda text, stream_end=False: write(text + "\n" * stream_end)
    return streamer
