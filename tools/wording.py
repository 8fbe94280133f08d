"""Refuse words that the glossary replaces, and count those that are often better said otherwise.

    python -m tools.wording [--warnings]

Checks the tracked Python, Markdown and TOML files, and fails with file, line and the word to use instead. Words that
are right in some places are only counted; ``--warnings`` prints their lines.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: Regular expression of a word to replacement.
WORDS = {
    r"\b(?:has|have|having|is|are|be) (?:to be )?told\b": "set, or: module overrides",
    r"\bside files?\b": "auxiliary files",
    r"(?:\b[kMGT]?B|\bbytes|\bfile|\bprocess) a rank\b": "per rank",
    r"\bdeal(?:t|s|ing)? (?:\w+ ){0,3}out\b": "distribute over ranks",
    r"\bbehind the last\b": "MTP layers",
    r"\b(?:not )?legal (?:tp|sizes?)\b": "supported, unsupported",
    r"\bplain (?:model|tensor)s?\b": "unsharded model, full tensor",
    r"\bspeaks?\b": "generates text",
    r"\bgo(?:es|ing)? on with\b": "continues",
    r"\bmodels? in (?:a|the) models?\b": "submodel",
    r"\bwords of the vocabulary\b": "vocabulary",
    r"\btables? of words\b": "embedding table",
    r"\b(?:by|over) words\b": "vocabulary-parallel",
    r"\bwhole tensors?\b": "full tensor",
    r"\b(?:whole on every rank|stays? whole|left whole)\b": "replicated",
    r"\b(?:is|are|be|was|were|being) cut\b": "sharded",
    r"\bcuts? (?:by|over|as|between|along|into)\b": "shard, boundary",
    r"\bplain (?:ones?|blocks?|weights?)\b": "unsharded, full",
    r"\bunsplit\b": "unsharded",
    r"\bcopied (?:input|heads?)\b": "all-reduce the input gradient, replicated",
    r"\bsummed output\b": "all-reduced output",
    r"\b(?:drawn tokens|tokens (?:that are )?drawn)\b": "sampled tokens",
    r"\b(?:made with|with) random numbers\b": "randomly initialized",
    r"\bletter by letter\b": "CTC",
    r"\b(?:the|all|every|each|both) ranks? says?\b|\branks say\b": "reports, returns",
    r"\bbe a rank\b(?!')": "start a process",
    r"\bhas not\b(?! (?:been|yet|\w+ed\b))": "does not have",
    r"\b(?:is|are|was|were|be|been|being|has|have|had|having) no\b": "is not, does not have, without",
    r"\b(?:nobody|whoever)\b": "no process, a caller",
    # keys of plan files and names of policies
    r"\bcopies = true\b": "replicate = true",
    r"\bwhole = true\b": "shard_if_divisible = true",
    r"[{,] parts = \[": "segments = [...]",
    r"[{,] part = \d": "segment = ...",
    r"(?:^|['\"`])\[(?:\w+\.)?parts\]": "[submodels]",
    r"\bon_parts\b": "on_shards",
    r"\bnot right\b": "failed, incorrect",
    r"\bput off\b": "deferred",
    r"\bcannot be sure\b": "cannot verify",
}
#: The same for openings of docstrings and of entries in the changelog, and for verdicts, with their case.
CASED = {
    r'"""(?:What|How|Which|Why|Who|Where|When) ': "a noun or a verb",
    r"^#: (?:What|Which|Why|Who) ": "a noun",
    r"^- (?:Get|See|Learn|Find) ": "what was added",
    r"\bDIFFERENT\b": "failed, differs",
    r"\bFAILED TO RUN\b": "failed to run",
}
#: The same for words that are right in some places.
WARNINGS = {
    r"\b(?:that|those) of\b": "repeat the noun, or say it shorter",
    r"\bthe ones? (?:that|which|of)\b": "repeat the noun",
    r"\blikewise\b": "a sentence with the fact",
    r"\bin place of\b": "instead of",
    r"\bthose (?:that|which|with)\b": "repeat the noun",
    r"\bwhat (?:is|are|was|were|has|have|it|they|the|a|an|no)\b": "the noun",
    r"^ +\w+: of (?!which)": "the noun: size: the size of ...",
}
_SUFFIXES = {".py", ".md", ".toml"}


def findings(words: dict[str, str], flags: re.RegexFlag) -> Iterator[str]:
    """Yield the file, line and replacement of each word in the tracked files."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    regex = re.compile("|".join(f"({word})" for word in words), flags)
    replacements = list(words.values())
    for path in (Path(name) for name in listed if Path(name).suffix in _SUFFIXES and name != "tools/wording.py"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for match in regex.finditer(line):
                yield f"{path}:{number}: {match[0]!r}: use {replacements[(match.lastindex or 1) - 1]}"


def main() -> int:
    """Print every finding; returns the exit code."""
    found = [*findings(WORDS, re.IGNORECASE), *findings(CASED, re.NOFLAG)]
    warnings = list(findings(WARNINGS, re.IGNORECASE))
    shown = [*found, *warnings] if "--warnings" in sys.argv[1:] else found
    sys.stdout.writelines(f"{line}\n" for line in shown)
    sys.stdout.write(f"{len(warnings)} lines may be said otherwise: python -m tools.wording --warnings\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
