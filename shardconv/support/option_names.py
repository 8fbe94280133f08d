"""The options that a message names, as arguments of the Python functions.

Messages name options as the command line has them. In Python, exceptions show ``head_dim=N`` for ``--head-dim N``.
Shell commands in a message (``shardconv split SRC --tp N``) stay as they are, and so do options without an argument in
Python. So does text of the user: what is quoted, and the subject before the first colon, unless it is an option.
"""

import json
import re

#: Option to the argument that has its value.
VALUES = {
    "-o": "dst", "--adapter": "adapters", "--against": "against", "--base": "base", "--batch": "batch",
    "--config": "config", "--device": "device", "--dtype": "dtype", "--experts": "experts", "--for": "engine",
    "--from": "source_layout", "--head-dim": "head_dim",
    "--ignore": "ignore", "--layout": "layout", "--max-file-size": "max_file_size", "--ranks": "ranks",
    "--replicate": "replicate", "--rules": "rules", "--seq": "seq", "--threads": "threads", "--tp": "tp",
    "--unused": "unused",
}  # fmt: skip
#: Option without a value to an argument and its value.
FLAGS = {
    "--check-model": "check_model=True", "--checksums": "checksums=True", "--dequantize": "dequantize=True",
    "--dry-run": "dry_run=True", "--follow-links": "follow_links=True", "--merge-adapter": "merge_adapter=True",
    "--no-check-model": "check_model=False", "--no-checksums": "checksums=False", "--no-verify": "verify=False",
    "--overwrite": "overwrite=True", "--pad": "pad=True", "--resume": "resume=True",
    "--trust-remote-code": "trust_remote_code=True", "--verify": "verify=True",
}  # fmt: skip
#: Arguments that take a list of values.
LISTS = {"adapters", "ignore", "replicate", "unused"}

#: A shell command, up to the end of its clause.
_COMMAND = r"\bshardconv [a-z]+\b(?:(?![,;)]|[.:](?:\s|$)).)*"
#: A value: a placeholder, a number, a quoted text, a known name, or a path or the name of a tensor.
_VALUE = (
    r"""[A-Z]+\b|\d+(?:[,-]\d+)*\b|\d+[kMG]B\b|"[^"]*"|'[^']*'|(?:bf16|cpu|cuda|dcp|deepseek|expert|fp16|fp32|meta|native|tensor|vllm|xpu)\b|"""
    r"""[^\s,;:()="']*[/._*][^\s,;:()]*[^\s,;:().]"""
)
_OPTION = (
    rf"(?<![\w-])(?P<option>--[a-z][a-z-]*|-o)(?![\w-])(?P<values>(?: (?:{_VALUE}))(?: (?P=option) (?:{_VALUE}))*)?"
)
#: A quoted text, not an apostrophe.
_QUOTED = r"""(?<!\w)'(?:\\.|[^'\\])*'|(?<!\w)"(?:\\.|[^"\\])*\""""
_SUBJECT = r"\A(?!-)(?:(?!: ).)*: "
_PATTERN = re.compile(f"{_SUBJECT}|{_COMMAND}|{_OPTION}|{_QUOTED}")


def in_python(message: str) -> str:
    """A message with arguments in place of options."""
    return _PATTERN.sub(_argument, message)


def _argument(match: re.Match[str]) -> str:
    """The argument for an option and its values; other matches are not changed."""
    option, values = match["option"], match["values"] or ""
    if option in FLAGS:
        return FLAGS[option] + values
    name = VALUES.get(option)
    if name is None or not values:
        return name or match[0]
    literals = [_literal(value) for value in values[1:].split(f" {option} ")]
    return f"{name}=[{', '.join(literals)}]" if name in LISTS else f"{name}={literals[0]}"


def _literal(value: str) -> str:
    """A value in Python: placeholders and numbers as they are, anything else as a string."""
    return value if value.isupper() or value.isdecimal() else json.dumps(value.strip("\"'"), ensure_ascii=False)
