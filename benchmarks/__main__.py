"""Run the benchmarks and write RESULTS.md: ``python -m benchmarks [--memory DIR] [--disk DIR] [--only NAME]``."""

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from math import prod
from pathlib import Path
from shutil import which
from typing import NamedTuple

from benchmarks import accelerator, layers, models
from benchmarks import run as running
from benchmarks import vllm_loading as vllm
from benchmarks.measure import Command, Pairs, read_bytes, remove, run, run_pairs
from benchmarks.remote import transfers
from benchmarks.resuming import compare as compare_resumed
from shardconv.checkpoint.engine.copy import STRIPE_BYTES

SHARDCONV: Command = (sys.executable, "-m", "shardconv")
RESULTS = Path(__file__).parent / "RESULTS.md"
ROUNDS = 5


class Row(NamedTuple):
    """A row of a table: the claim, its goal, the measured figure and details."""

    claim: str
    goal: str
    figure: str
    detail: str


class Place(NamedTuple):
    """A folder to measure in, its kind of storage, and the bytes of memory to write and free before each command."""

    kind: str
    folder: Path
    warm_bytes: int = 0


def shardconv(*words: str | Path) -> Command:
    """A shardconv command in a new process."""
    return (*SHARDCONV, *words)


@contextmanager
def llama(place: Place) -> Iterator[Path]:
    """Write the source of most rows, and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        source = folder / "llama.safetensors"
        write_llama(source)
        (folder / "config.json").write_text(json.dumps(models.LLAMA_CONFIG))
        os.sync()
        yield source
    finally:
        remove(folder)


def write_llama(path: Path, *options: str) -> int:
    """Write a source in a new process, as a child inherits the peak memory of its parent."""
    run((sys.executable, "-m", "benchmarks.models", path, *options))
    return path.stat().st_size


#: Reads some bytes of a file in blocks, or writes as many to each target, or copies them, and does nothing else.
_LOOP = """
import mmap, os, sys
kind, size, source, *targets = sys.argv[1:]
size, block = int(size), memoryview(mmap.mmap(-1, 2**18))
read = os.open(source, os.O_RDONLY)
write = [os.open(target, os.O_CREAT | os.O_WRONLY) for target in targets]
if kind == "read and hash":
    import xxhash
    hashed = xxhash.xxh3_128()
for offset in range(0, size, len(block)):
    if kind != "write":
        os.preadv(read, [block], offset)
    if kind == "read and hash":
        hashed.update(block)
    elif kind != "read":
        for target in write:
            os.pwrite(target, block, offset)
"""

#: Copies a file by two threads, each of which hashes what it reads, and does nothing else.
_TO_ONE_FILE = """
import mmap, os, sys, threading, xxhash
from concurrent.futures import ThreadPoolExecutor
read, write = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
size, stripe, block = os.fstat(read).st_size, 2**25, 2**18
starts, starting, writing = iter(range(0, size, stripe)), threading.Lock(), threading.Lock()
os.truncate(write, size)
def copy():
    buffer = memoryview(mmap.mmap(-1, block))
    while True:
        with starting:
            if (start := next(starts, None)) is None:
                return
        hashed = xxhash.xxh3_128()
        for offset in range(start, min(start + stripe, size), block):
            data = buffer[: min(block, size - offset)]
            assert os.preadv(read, [data], offset) == len(data)
            hashed.update(data)
            with writing:
                assert os.pwrite(write, data, offset) == len(data)
with ThreadPoolExecutor(2) as pool:
    for each in [pool.submit(copy) for _ in range(2)]:
        each.result()
"""


#: Splits a file into eight, or merges eight parts of it into one, by two threads that read, hash and write blocks of
#: 2 MiB, and do nothing else. Of ten blocks some consist of columns of 2 KiB, which are at the beginning of each part;
#: each other is of one part. The threads begin half the source apart, so that they rarely wait for each other's file.
_COLUMNS = """
import mmap, os, sys, threading, xxhash
from concurrent.futures import ThreadPoolExecutor
kind, share, source, *targets = sys.argv[1:]
block, part, stripe = 2**21, 2**18, 2**25
read = os.open(source, os.O_RDONLY)
size = os.fstat(read).st_size // (80 * block) * 80 * block
write = [os.open(target, os.O_CREAT | os.O_WRONLY) for target in targets]
half, share = size // 2, int(share)
ranges = iter([(at + start, at + min(start + stripe, half)) for start in range(0, half, stripe) for at in (0, half)])
starting, writing = threading.Lock(), [threading.Lock() for _ in write]
def before(offset):  # bytes of blocks of columns
    tens, rest = divmod(offset // block, 10)
    return (tens * share + min(rest, share)) * block
def position(offset, parts):
    number, at = divmod(offset - before(offset), (size - before(size)) // parts)
    return number, before(size) // parts + at
for target in write:
    os.truncate(target, size // len(write))
def put(number, data, offset):
    for at in range(0, len(data), part):
        with writing[number]:
            os.pwrite(write[number], data[at : at + part], offset + at)
def scatter(buffer, column, columns, hashed, offset):
    os.preadv(read, [buffer], offset)
    for number in range(8):
        columns[0][...] = columns[1][:, number]
        hashed[number].update(column)
        put(number, column, before(offset) // 8)
def gather(buffer, column, columns, hashed, offset):
    for number in range(8):
        os.preadv(read, [column], (number * size + before(offset)) // 8)
        hashed[number].update(column)
        columns[1][:, number] = columns[0]
    put(0, buffer, before(offset))
def copy():
    buffer, column = memoryview(mmap.mmap(-1, block)), memoryview(mmap.mmap(-1, part))
    columns = None
    while True:
        with starting:
            if (bounds := next(ranges, None)) is None:
                return
        hashed = [xxhash.xxh3_128() for _ in range(8)]
        for offset in range(*bounds, block):
            if offset // block % 10 < share:
                if columns is None:
                    import numpy as np
                    columns = np.ndarray((128, 2**11), "u1", column), np.ndarray((128, 8, 2**11), "u1", buffer)
                {"split": scatter, "merge": gather}[kind](buffer, column, columns, hashed, offset)
                continue
            number, at = position(offset, 8)
            os.preadv(read, [buffer], number * size // 8 + at if kind == "merge" else offset)
            hashed[0].update(buffer)
            number, at = position(offset, len(write))
            put(number, buffer, at)
with ThreadPoolExecutor(2) as pool:
    for each in [pool.submit(copy) for _ in range(2)]:
        each.result()
"""


def bounds(place: Place) -> Iterator[Row]:
    """Loops that read, hash or write bytes of the source and do nothing else, by one thread unless a row says two.

    A split of an adapter (section adapters) reads a part of what it writes, as the loop of the fifth row does. A
    verified load (loading_and_running) reads and hashes its files, and maps them. A merge, and a split to one file
    (megatron_files), hash what they copy, with two threads, of which one writes at a time. Of a checkpoint of GPTQ
    (quantized), 7 of 10 bytes are of matrices whose columns are sharded; of one of bf16, such as the source of
    usual_script, 3 of 10. The loops with columns copy 98 % of the source.
    """
    with llama(place) as source:
        copied, size = source.parent / "cp.out", source.stat().st_size
        targets = tuple(source.parent / f"out{number}" for number in range(8))
        pairs_of = partial(run_pairs, outputs=(copied, *targets), rounds=ROUNDS, warm_bytes=place.warm_bytes)
        loop, copy = (sys.executable, "-c", _LOOP), ("cp", source, copied)
        for kind in ("read", "read and hash", "write", "copy"):
            pairs = pairs_of((*loop, kind, str(size), source, targets[0]), copy)
            yield _pair_row(f"{kind} in blocks of 256 KiB / cp, {place.kind}", "(none)", pairs, "cp")
        pairs = pairs_of((*loop, "copy", str(size // 4), source, *targets[:4]), copy)
        yield _pair_row(f"read a quarter, and write it four times / cp, {place.kind}", "(none)", pairs, "cp")
        pairs = pairs_of((sys.executable, "-c", _TO_ONE_FILE, source, targets[0]), copy)
        yield _pair_row(f"read, hash and write one file by two threads / cp, {place.kind}", "(none)", pairs, "cp")
        for kind, of in (("split", targets), ("merge", targets[:1])):
            columns = (sys.executable, "-c", _COLUMNS, kind)
            pairs = pairs_of((*columns, "7", source, *of), (*columns, "3", source, *of))
            claim = f"{kind}, 7 of 10 blocks of columns / 3 of 10, two threads, {place.kind}"
            yield _pair_row(claim, "(none)", pairs, "3 of 10")
        script = (sys.executable, Path(__file__).with_name("usual_script.py"), source, copied, "8")
        pairs = pairs_of(script, (sys.executable, "-c", _COLUMNS, "split", "3", source, *targets))
        yield _pair_row(f"usual script / split, 3 of 10 blocks of columns, {place.kind}", "(none)", pairs, "split")


def hosts(place: Place) -> Iterator[Row]:
    """Split for 8 ranks on one of four hosts, which writes 2 of them, compared with a split that writes all."""
    with llama(place) as source:
        size, parent = source.stat().st_size, source.parent
        some, every = parent / "some", parent / "every"
        all_ranks = shardconv("split", source, "--tp", "8", "-o", every)
        two_ranks = shardconv("split", source, "--tp", "8", "--ranks", "0-1", "-o", some)
        pairs = run_pairs(two_ranks, all_ranks, outputs=(some, every), rounds=ROUNDS)
        yield _pair_row(f"split of ranks 0-1 / of all 8, time, {place.kind}", "0.6 or less", pairs, "all")
        for ranks, command in (("0-1", two_ranks), ("0-7", all_ranks)):
            read = read_bytes(command)
            remove(some)
            remove(every)
            yield Row(
                f"bytes that a split of ranks {ranks} reads / source",
                "(none)",
                f"{read / size:.2f}",
                f"{read / 1e9:.2f} GB",
            )


def _pair_row(claim: str, goal: str, pairs: Pairs, against: str) -> Row:
    detail = f"{_fastest(pairs, against)}, peak {pairs.peak_mb:.0f} MB"
    return Row(claim, goal, f"{pairs.ratio:.2f}", detail)


def _fastest(pairs: Pairs, against: str) -> str:
    """The ratio of the fastest runs, and their times."""
    ours, theirs = (
        f"{run.seconds:.2f} s ({run.user:.2f} + {run.system:.2f})"
        for run in (pairs.fastest(pairs.ours), pairs.fastest(pairs.theirs))
    )
    return f"fastest {pairs.fastest_ratio:.2f}: {ours}, {against} {theirs}"


def copying(place: Place) -> Iterator[Row]:
    """Split, merge and reshard, compared with ``cp`` of the source.

    Memory is warm if as much as the commands write was written and freed before each of them: on a virtual machine,
    memory that comes from the host takes two to three times as long to write, also for ``cp``.
    """
    with llama(place) as source:
        parent = source.parent
        copied, out, out4, back = parent / "cp.out", parent / "out8", parent / "out4", parent / "back.safetensors"
        run_in_turns = partial(run_pairs, rounds=ROUNDS, warm_bytes=place.warm_bytes)
        copy = ("cp", source, copied)
        split = shardconv("split", source, "--tp", "8", "-o", out)
        pairs = run_in_turns(split, copy, outputs=(copied, out))
        yield _pair_row(f"split for tp=8 / cp, {place.kind}", "0.7 or less", pairs, "cp")
        run(split)
        pairs = run_in_turns(shardconv("merge", out, "-o", back), copy, outputs=(copied, back))
        yield _pair_row(f"merge of 8 into one file / cp, {place.kind}", "0.9 or less", pairs, "cp")
        again = shardconv("reshard", out, "--tp", "4", "-o", out4)
        pairs = run_in_turns(again, copy, outputs=(copied, out4))
        yield _pair_row(f"reshard 8 to 4 / cp, {place.kind}", "0.9 or less", pairs, "cp")
        pairs = run_in_turns(shardconv("verify", out, "--against", source), copy, outputs=(copied,))
        yield _pair_row(f"verify --against source / cp, {place.kind}", "(none)", pairs, "cp")


def quantized(place: Place) -> Iterator[Row]:
    """Split and merge of quantized checkpoints, compared with an unquantized one of as many bytes (bf16).

    Memory is warm (section copying).
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    outputs = tuple(folder / name for name in ("out", "out-bf16", "back", "back-bf16"))
    out, out_bf16, back, back_bf16 = outputs
    pairs_of = partial(run_pairs, rounds=ROUNDS, warm_bytes=place.warm_bytes)
    try:
        sizes = {form: _write_quantized(folder / form, form) for form in ("bf16", "gptq", "fp8")}
        for form in ("gptq", "fp8"):
            per_byte = sizes["bf16"] / sizes[form]
            split = shardconv("split", folder / form, "--tp", "8", "-o", out)
            split_bf16 = shardconv("split", folder / "bf16", "--tp", "8", "-o", out_bf16)
            pairs = pairs_of(split, split_bf16, outputs=(out, out_bf16))
            yield _rate_row(f"split for tp=8, {form} / bf16, time per byte", pairs, per_byte)
            run(split)
            run(split_bf16)
            merge = shardconv("merge", out, "-o", back)
            merge_bf16 = shardconv("merge", out_bf16, "-o", back_bf16)
            pairs = pairs_of(merge, merge_bf16, outputs=(back, back_bf16))
            yield _rate_row(f"merge of 8, {form} / bf16, time per byte", pairs, per_byte)
            remove(out)
            remove(out_bf16)
            remove(folder / form)
    finally:
        remove(folder)


def _write_quantized(folder: Path, form: str) -> int:
    run((sys.executable, "-m", "benchmarks.models", folder, "--format", form))
    return (folder / "model.safetensors").stat().st_size


def _rate_row(claim: str, pairs: Pairs, per_byte: float) -> Row:
    peak = max(usage.peak_mb for usage in pairs.theirs)
    detail = f"{_fastest(pairs, 'bf16')}, peak {pairs.peak_mb:.0f} MB, bf16 {peak:.0f} MB"
    return Row(claim, "1.1 or less", f"{pairs.ratio * per_byte:.2f}", detail)


def pytorch_files(place: Place) -> Iterator[Row]:
    """Split of a PyTorch file of 3 GB, compared with ``cp`` of it and with a split of the same safetensors file.

    The time includes an import of torch, and the peak memory is of the process that imports it.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    plain, pickled, out, other = (folder / name for name in ("plain", "pickled", "out", "other"))
    try:
        _write_quantized(plain, "bf16")
        pickled.mkdir()
        weights = pickled / "pytorch_model.bin"
        run((sys.executable, "-c", models.TO_PYTORCH, plain / "model.safetensors", weights))
        (pickled / "config.json").write_bytes((plain / "config.json").read_bytes())
        split, split_plain = (shardconv("split", source, "--tp", "8", "-o", out) for source in (pickled, plain))
        pairs = run_pairs(split, ("cp", weights, other), outputs=(out, other), rounds=ROUNDS)
        yield _pair_row("split of a PyTorch file for tp=8 / cp", "(none)", pairs, "cp")
        pairs = run_pairs(split, split_plain, outputs=(out,), rounds=ROUNDS)
        yield _pair_row("split for tp=8, PyTorch file / safetensors", "(none)", pairs, "safetensors")
    finally:
        remove(folder)


def meta_files(place: Place) -> Iterator[Row]:
    """Merge of Meta's files of two ranks with 3 GB, compared with ``cp`` of them; includes an import of torch."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    plain, meta, out, other = (folder / name for name in ("plain", "meta", "out", "other"))
    try:
        _write_quantized(plain, "bf16")
        run(shardconv("split", plain, "--tp", "2", "--layout", "meta", "-o", meta))
        pairs = run_pairs(
            shardconv("merge", meta, "-o", out), ("cp", "-r", meta, other), outputs=(out, other), rounds=ROUNDS
        )
        yield _pair_row("merge of Meta's files of 2 ranks / cp", "(none)", pairs, "cp")
    finally:
        remove(folder)


def megatron_files(place: Place) -> Iterator[Row]:
    """A checkpoint of Megatron-Core of a model of 3 GB, and back, compared with ``cp`` and with other writers.

    torch's writer saves the tensors of the source under their names. Megatron-Core builds its model, without copying
    values into it, and saves it, which is less than what its converters do; it runs where it can be imported. Memory is
    warm (section copying).
    """
    pairs_of = partial(run_pairs, rounds=ROUNDS, warm_bytes=place.warm_bytes)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    plain, megatron, saved, out, other = (folder / name for name in ("plain", "megatron", "saved", "out", "other"))
    try:
        _write_quantized(plain, "bf16")
        split = shardconv("split", plain, "--layout", "megatron", "-o", megatron)
        copy = ("cp", "-r", plain, other)
        pairs = pairs_of(split, copy, outputs=(megatron, other))
        yield _pair_row("split --layout megatron / cp", "1.0 or less", pairs, "cp")
        pairs = pairs_of((*split, "--tp", "2"), copy, outputs=(megatron, other))
        yield _pair_row("split --layout megatron --tp 2 (two files) / cp", "1.0 or less", pairs, "cp")
        writers = {"torch.distributed.checkpoint.save": (models.TO_DCP, plain / "model.safetensors", saved)}
        if find_spec("megatron") is not None:
            writers["GPTModel and dist_checkpointing.save"] = (models.TO_MEGATRON, plain, saved)
        for name, script in writers.items():
            outputs = (saved, megatron, folder / "rendezvous")
            pairs = pairs_of((sys.executable, "-c", *script), split, outputs=outputs)
            peak = max(usage.peak_mb for usage in pairs.theirs)
            detail = f"{_fastest(pairs, 'split')}, peak {pairs.peak_mb:.0f} MB, split {peak:.0f} MB"
            yield Row(f"{name} / split --layout megatron", "(none)", f"{pairs.ratio:.1f}", detail)
        run(split)
        pairs = pairs_of(shardconv("merge", megatron, "-o", out), copy, outputs=(out, other))
        yield _pair_row("merge of a checkpoint of Megatron-Core / cp", "1.0 or less", pairs, "cp")
        yield from _transposed(folder, pairs_of)
    finally:
        remove(folder)


def _transposed(folder: Path, pairs_of: Callable[..., Pairs]) -> Iterator[Row]:
    """The same for gpt-oss (1.1 GB), whose experts of 17 and 33 MB are transposed."""
    source, megatron, out, other = (folder / name for name in ("gpt-oss", "transposed", "merged", "copied"))
    run((sys.executable, "-m", "benchmarks.models", source, "--gpt-oss"))
    copy = ("cp", "-r", source, other)
    split = shardconv("split", source, "--layout", "megatron", "-o", megatron)
    for threads in ("2", "8"):
        pairs = pairs_of((*split, "--threads", threads), copy, outputs=(megatron, other))
        claim = f"split --layout megatron --threads {threads} of gpt-oss / cp"
        yield _pair_row(claim, "(none)", pairs, "cp")
    run(split)
    pairs = pairs_of(shardconv("merge", megatron, "-o", out), copy, outputs=(out, other))
    yield _pair_row("merge of gpt-oss of Megatron-Core / cp", "(none)", pairs, "cp")


def adapters(place: Place) -> Iterator[Row]:
    """Split and merge of a LoRA adapter of 1 GB (float32, rank 448), and a split of its model with it merged.

    Matrices A of column parallel layers and B of row parallel ones are replicated, so 8 ranks hold 3.8 times the
    adapter. Merging it into the model multiplies matrices of 448 columns, which takes most of the time.
    """
    with llama(place) as source:
        adapter, copied, written, out, back = (
            source.parent / name for name in ("adapter", "cp.out", "written", "out8", "back")
        )
        run((sys.executable, "-m", "benchmarks.models", adapter, "--adapter"))
        split = shardconv("split", adapter, "--base", source, "--tp", "8", "-o")
        run((*split, written))
        pairs = run_pairs((*split, out), ("cp", "-r", written, copied), outputs=(copied, out), rounds=ROUNDS)
        yield _pair_row("split of an adapter for tp=8 / cp of the result", "0.8 or less", pairs, "cp")
        copy = ("cp", adapter / "adapter_model.safetensors", copied)
        pairs = run_pairs(shardconv("merge", written, "-o", back), copy, outputs=(copied, back), rounds=ROUNDS)
        yield _pair_row("merge of an adapter of 8 ranks / cp", "0.9 or less", pairs, "cp")
        remove(written)
        merged = shardconv("split", source, "--adapter", adapter, "--merge-adapter", "--tp", "8", "-o", out)
        pairs = run_pairs(merged, ("cp", source, copied), outputs=(copied, out), rounds=2)
        yield _pair_row("split with --merge-adapter for tp=8 / cp of the model", "(none)", pairs, "cp")


def usual_script(place: Place) -> Iterator[Row]:
    """Split, compared with a common script (get_slice, save_file)."""
    with llama(place) as source:
        ours, theirs = source.parent / "ours", source.parent / "theirs"
        script = (sys.executable, Path(__file__).with_name("usual_script.py"), source, theirs, "8")
        split = shardconv("split", source, "--tp", "8", "-o", ours)
        pairs = run_pairs(split, script, outputs=(ours, theirs), rounds=ROUNDS)
        theirs_mb = max(usage.peak_mb for usage in pairs.theirs)
        yield Row(
            "script / split",
            "4 or more",
            f"{1 / pairs.ratio:.1f}",
            f"{_fastest(pairs, 'script')}, peak {pairs.peak_mb:.0f} MB, script {theirs_mb:.0f} MB",
        )


def checksums(place: Place) -> Iterator[Row]:
    """Time of a split with checksums, compared with one without."""
    with llama(place) as source:
        out = source.parent / "out"
        split = shardconv("split", source, "--tp", "8", "-o", out)
        pairs = run_pairs(split, (*split, "--no-checksums"), outputs=(out,), rounds=2 * ROUNDS)
        yield _pair_row("split with checksums / without", "1.10 or less", pairs, "without")


def resuming(place: Place) -> Iterator[Row]:
    """Time of a split with its journal, compared with one without; and of a split that was killed at half."""
    main = "from shardconv.cli import main; main()"
    module = "import shardconv.checkpoint.operations.split_writing as split"
    with llama(place) as source:
        out = source.parent / "out"
        words = ("split", source, "--tp", "8", "-o", out)
        journal: Command = (sys.executable, "-c", f"{module}; {main}", *words)
        without = f"{module}; split.CheckpointWriter._journal = lambda *_: None"
        none: Command = (sys.executable, "-c", f"{without}; {main}", *words)
        pairs = run_pairs(journal, none, outputs=(out,), rounds=2 * ROUNDS)
        yield _pair_row(f"split with its journal / without, {place.kind}", "1.05 or less", pairs, "without")
        half = source.stat().st_size // STRIPE_BYTES // 2
        pairs = compare_resumed(shardconv(*words), out, half, ROUNDS)
        yield _pair_row(f"split resumed at 50 % / split, {place.kind}", "0.8 or less", pairs, "split")


def memory(place: Place) -> Iterator[Row]:
    """Peak memory for sources of three sizes."""
    for count in (2, 10, 40):
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
        source, out, out4, back = (folder / name for name in ("llama.safetensors", "out8", "out4", "back.safetensors"))
        gigabytes = write_llama(source, "--sparse", "--layers", str(count)) / 1e9
        (folder / "config.json").write_text(json.dumps(models.LLAMA_CONFIG))
        commands = {
            "split": shardconv("split", source, "--tp", "8", "-o", out),
            "merge": shardconv("merge", out, "-o", back),
            "reshard": shardconv("reshard", out, "--tp", "4", "-o", out4),
            "verify": shardconv("verify", out, "--against", source),
        }
        peaks = {}
        for name, command in commands.items():
            peaks[name] = run(command).peak_mb
            remove(back)
            remove(out4)
        remove(folder)
        each = ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items())
        yield Row(f"peak RSS in MB, source of {gigabytes:.1f} GB", "64 or less", f"{max(peaks.values()):.0f}", each)


#: Imports the modules of the arguments, reads and unmarshals the bytecode files among them, and exits at once.
_BYTECODE = """
import gc, marshal, os, sys
gc.disable()
for each in sys.argv[1:]:
    if each.endswith(".pyc"):
        with open(each, "rb") as file:
            file.seek(16)
            marshal.loads(file.read())
    else:
        __import__(each)
os._exit(0)
"""
#: Imports the modules of a plan.
_IMPORTS = """\
import gc, os, sys
gc.disable()
import shardconv.cli, shardconv.commands.plan, shardconv.checkpoint.operations.plan_report
"""
#: Prints the modules whose functions a plan calls, after its report.
_CALLED = f"""{_IMPORTS}
called = set()
sys.setprofile(lambda frame, *_: called.add(frame.f_globals.get("__name__")))
shardconv.cli.cli.main(sys.argv[1:], standalone_mode=False)
sys.setprofile(None)
print(*called)
"""
#: Imports the modules of a plan, with empty modules for the named ones. What others import from an empty one is a class
#: that can be a base, a decorator, a constant or part of an annotation.
_EMPTY = f"""
import sys, types
class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
    def __call__(cls, *arguments, **_):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls
    def __iter__(cls):
        return iter(())
    __getitem__ = __or__ = __ror__ = lambda cls, _: cls
class Empty(types.ModuleType):
    __path__ = ()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type.__call__(Kind, name, (), {{}})
sys.modules |= {{name: Empty(name) for name in sys.argv[1:]}}
{_IMPORTS}os._exit(0)
"""


def startup(_: Place) -> Iterator[Row]:
    """``--help``, and a plan of the demo model, compared with the start of Python.

    The first four rows bound the plan: import its libraries; also read the bytecode of shardconv; also execute it; and
    the same with empty modules for those of which the plan calls no function. The last row adds the plan's work.
    """
    nothing: Command = (sys.executable, "-c", "pass")
    listed = subprocess.check_output([sys.executable, "-c", f"{_IMPORTS}print(*sys.modules)"], text=True).split()
    own = {name: str(spec.cached) for name in listed if name.startswith("shardconv") and (spec := find_spec(name))}
    libraries = [name for name in listed if name not in own and name != "__main__"]
    plan = ("plan", str(Path(__file__).parents[1] / "examples" / "demo-model"), "--tp", "2")
    report = subprocess.check_output([sys.executable, "-c", _CALLED, *plan], text=True)
    unused = own.keys() - report.splitlines()[-1].split() - {name.rpartition(".")[0] for name in own}
    for work, goal, command in (
        ("libraries of a plan", "(none)", (sys.executable, "-c", _BYTECODE, *libraries)),
        ("libraries of a plan, bytecode read", "(none)", (sys.executable, "-c", _BYTECODE, *libraries, *own.values())),
        ("imports of a plan", "(none)", (sys.executable, "-c", f"{_IMPORTS}os._exit(0)")),
        ("imports of a plan, without modules that it does not call", "(none)", (sys.executable, "-c", _EMPTY, *unused)),
        ("--help", "6 or less", shardconv("--help")),
        ("plan of the demo model", "6 or less", shardconv(*plan)),
    ):
        pairs = run_pairs(command, nothing, rounds=4 * ROUNDS)
        yield _pair_row(f"{work} / python -c pass", goal, pairs, "python -c pass")


#: Reads the headers of a folder, parses them, and replaces the numbers of each name, as layers have equal plans.
_HEADERS = """
import re, sys
from pathlib import Path
import msgspec
numbers, patterns = re.compile(r"\\d+"), {}
for path in Path(sys.argv[1]).glob("*.safetensors"):
    with path.open("rb") as file:
        header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
    for name, entry in header.items():
        patterns.setdefault(numbers.sub("N", name), []).append((name, *entry.values()))
"""


def planning(place: Place) -> Iterator[Row]:
    """Plans and dry runs for checkpoints with the names and shapes of DeepSeek-V3, in fp8 and in bf16.

    The first row of each has the least that a plan does: its headers are parsed, and names are grouped. Then models
    with few bytes and as many tensors as DeepSeek-V3 and Kimi K2, which are written as checkpoints of Megatron-Core,
    and back.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    out = folder / "out"
    for name in models.DEEPSEEK:
        source, megatron = folder / name, folder / f"{name}-megatron"
        run((sys.executable, "-m", "benchmarks.models", source, "--deepseek", name))  # see write_llama
        gigabytes = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        count = (source / "model.safetensors.index.json").read_text().count(': "model-')
        what = f"{count:,} tensors in 163 files ({gigabytes:.1f} GB, sparse)"
        dry = ("--dry-run", "-o", out)
        to_megatron = shardconv("split", source, "--layout", "megatron")
        commands = {
            "headers": ((sys.executable, "-c", _HEADERS, source), "(none)", "(none)"),
            "plan": (shardconv("plan", source, "--tp", "8"), "3 or less", "400 or less"),
            "split --tp 8": (shardconv("split", source, "--tp", "8", *dry), "(none)", "(none)"),
        }
        if name == "bf16":
            commands["split --layout megatron --dry-run"] = (*to_megatron, *dry), "(none)", "64 or less"
        if name in {"small", "kimi"}:
            run((*to_megatron, "-o", megatron))
            split, back = (*to_megatron, "-o", out, "--overwrite"), folder / "back"
            commands = {
                "split --layout megatron --dry-run": ((*to_megatron, *dry), "(none)", "64 or less"),
                "split --layout megatron": (split, "(none)", "64 or less"),
                "split --layout megatron --threads 8": ((*split, "--threads", "8"), "(none)", "64 or less"),
                "plan of Megatron-Core's checkpoint": (shardconv("plan", megatron, "--tp", "2"), "(none)", "(none)"),
                "merge of Megatron-Core's checkpoint": (
                    shardconv("merge", megatron, "-o", back, "--overwrite"), "(none)", "(none)",
                ),
            }  # fmt: skip
        for operation, (command, seconds_goal, peak_goal) in commands.items():
            usages = [run(command) for _ in range(ROUNDS)]
            seconds = sorted(usage.seconds for usage in usages)[ROUNDS // 2]
            peak = max(usage.peak_mb for usage in usages)
            yield Row(f"{operation} of {what}, s", seconds_goal, f"{seconds:.2f}", "median of the runs")
            yield Row(f"{operation} of {what}, MB", peak_goal, f"{peak:.0f}", "highest of the runs")
    remove(folder)


def parallel_layers(place: Place) -> Iterator[Row]:
    """Forward and backward of a transformer block on two ranks with gloo, one thread each."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    for size, goal in ((layers.SMALL, "1.3 or more"), (layers.LARGE, "1.0 or more")):
        report = layers.measure(("ours", "torch"), size, folder, 4 * ROUNDS)
        speed, ours, theirs = layers.ratio(report, "ours", "torch")
        claim = f"torch's parallelize_module / ours, width {size[0]}, {size[1]} tokens"
        yield Row(
            claim, goal, f"{speed:.2f}", f"{ours * 1e3:.1f} ms per step, parallelize_module {theirs * 1e3:.1f} ms"
        )
    split = layers.measure(("ours",), layers.HEAVY, folder, 1)
    unsharded = layers.measure(("unsharded",), layers.HEAVY, folder, 1, ranks=1)
    ours, theirs = max(rank["peak_bytes"] for rank in split), unsharded[0]["peak_bytes"]
    claim = f"peak memory per rank / of the unsharded block, width {layers.HEAVY[0]}, {layers.HEAVY[1]} tokens"
    yield Row(claim, "0.55 or less", f"{ours / theirs:.2f}", f"{ours / 1e6:.0f} MB, unsharded {theirs / 1e6:.0f} MB")
    remove(folder)


def loading_and_running(place: Place) -> Iterator[Row]:
    """`shardconv.load` of a split checkpoint, compared with transformers' tensor parallelism on the source.

    Two ranks with gloo, one thread each; warm page cache, bf16.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        source, split = folder / "source", folder / "split"
        running.write_model(source)
        run(shardconv("split", source, "--tp", str(running.RANKS), "-o", split))
        found = running.compare(source, split, folder, ROUNDS)
    finally:
        remove(folder)
    claims = {
        "load": ("load time", "0.5 or less", 1, "s"),
        "bytes": ("bytes of the checkpoint that are mapped or read per rank", "0.5 or less", 1e6, "MB"),
        "memory": ("peak private memory per rank during load", "0.6 or less", 1e6, "MB"),
        "first": (f"first pass of {running.FIRST} tokens, with page faults", "(none)", 1, "s"),
        "prefill": (f"prefill of {running.PROMPT} tokens", "1.0 or less", 1, "s"),
        "decode": ("time per token", "1.0 or less, aim 0.77", 1e-3, "ms"),
    }
    for name, (claim, goal, unit, symbol) in claims.items():
        ratio, ours, theirs = found[name]
        shown = (f"{seconds / unit:.{2 if symbol == 's' else 0}f} {symbol}" for seconds in (ours, theirs))
        detail = ", transformers ".join(shown)
        yield Row(f"{claim} / transformers'", goal, f"{ratio:.2f}", detail)


def loading_on_a_gpu(place: Place) -> Iterator[Row]:
    """`shardconv.load` of a model of 4.8 GB on one GPU, compared with transformers and safetensors.

    Files on a tmpfs, bf16. Ratios are of medians. All models generate the same 12 tokens.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        source, split = folder / "source", folder / "split"
        accelerator.write_model(source)
        run(shardconv("split", source, "--tp", "1", "-o", split))
        found = accelerator.measure(source, split, ROUNDS)
    finally:
        remove(folder)
    base, goals = found["transformers"], {"split": "0.5 or less", "source": "0.5 or less"}
    for kind, claim in accelerator.KINDS.items():
        figures = found[kind]
        detail = (
            f"{figures['load']:.2f} s, fastest {figures['fastest']:.2f} s; peak memory of the device "
            f"{figures['memory'] / figures['model']:.2f} of the values"
        )
        yield Row(claim, goals.get(kind, "(none)"), f"{figures['load'] / base['load']:.2f}", detail)


def diffusion(place: Place) -> Iterator[Row]:
    """A pipeline of 3 GB, compared with ``cp``; and a step of a FLUX-like transformer of 1.1 GB, with diffusers.

    diffusers' tensor parallelism reads slices of the source. Two ranks with gloo, one thread each; warm page cache,
    bf16; 512 tokens of an image and 64 of a text. The outputs of both are compared.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    worker = (sys.executable, "-m", "benchmarks.diffusion")
    source, split, out, other = (folder / name for name in ("source", "split", "out", "other"))
    try:
        run((*worker, "write-pipeline", source))
        copy = ("cp", "-r", source, other)
        pairs = run_pairs(
            shardconv("split", source, "--tp", "8", "-o", split), copy, outputs=(split, other), rounds=ROUNDS
        )
        yield _pair_row("split of a pipeline for tp=8 / cp", "(none)", pairs, "cp")
        run(shardconv("split", source, "--tp", "8", "-o", split))
        pairs = run_pairs(shardconv("merge", split, "-o", out), copy, outputs=(out, other), rounds=ROUNDS)
        yield _pair_row("merge of a pipeline of 8 ranks / cp", "(none)", pairs, "cp")
        remove(source)
        remove(split)
        run((*worker, "write-model", source))
        run(shardconv("split", source, "--tp", str(running.RANKS), "-o", split))
        claims = {
            "load": ("load time", 1, "s"),
            "bytes": ("bytes of the checkpoint that are mapped or read per rank", 1e6, "MB"),
            "parameters": ("bytes of parameters per rank", 1e6, "MB"),
            "memory": ("peak private memory per rank during load", 1e6, "MB"),
            "step": ("time per step", 1, "s"),
        }
        found = running.compare(source, split, folder, ROUNDS, claims, module="benchmarks.diffusion")
    finally:
        remove(folder)
    for name, (claim, unit, symbol) in claims.items():
        ratio, ours, theirs = found[name]
        shown = (f"{figure / unit:.{2 if symbol == 's' else 0}f} {symbol}" for figure in (ours, theirs))
        yield Row(f"{claim} / diffusers'", "(none)", f"{ratio:.2f}", ", diffusers ".join(shown))


def loading_a_source(place: Place) -> Iterator[Row]:
    """`shardconv.load(SRC, tp=2)`, compared with a split checkpoint and with transformers' tensor parallelism.

    Two ranks with gloo, one thread each; bf16. Times are those to the end of a first pass of 8 tokens, which reads
    values that are mapped; a second load is one of the same process. Memory is warm: directly before a load, the files
    are read, and dropped from the page cache if it is to be cold. Bytes are of the checkpoint per rank: read and in the
    rank's memory together, which are the same bytes if a split is verified; and read from storage. Ratios are to
    transformers.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        source, split = folder / "source", folder / "split"
        running.write_model(source)
        run(shardconv("split", source, "--tp", str(running.RANKS), "-o", split))
        forms = {"theirs": source, "source": source, "ours": split, "verified": split, "read": split, "plain": source}
        found = running.compare_cold(forms, folder, ROUNDS)
    finally:
        remove(folder)
    names = {
        "source": "source", "ours": "split, without verification", "verified": "split", "theirs": "transformers",
        "read": "split, without verification, after one read of the rank's file",
        "plain": "transformers without tensor parallelism",
    }  # fmt: skip
    for (kind, is_cold), figures in found.items():
        base = found["theirs", is_cold]
        ratio = (figures["load"] + figures["first"]) / (base["load"] + base["first"])
        detail = (
            f"load {figures['load']:.2f} s, first pass {figures['first']:.2f} s; "
            f"read {figures['touched'] / 1e6:.0f} MB, from storage {figures['storage'] / 1e6:.0f} MB, by both "
            f"{figures['all'] / 1e6:.0f} MB; private memory {figures['memory'] / 1e6:.0f} MB"
        )
        goal = "1.0 or less" if kind == "source" else "(none)"
        yield Row(f"{names[kind]}, {'cold' if is_cold else 'warm'}", goal, f"{ratio:.2f}", detail)
        if not is_cold and kind != "read":
            second = figures["second"]
            yield Row(f"{names[kind]}, second load", "(none)", f"{second / base['second']:.2f}", f"{second:.2f} s")


def remote(place: Place) -> Iterator[Row]:
    """Transfers to and from a loopback S3 server, compared with a client of the store that transfers the same bytes.

    The server and the clients share the processors. The server discards data without checks, so that the
    clients bound the rate; all of them compute SHA-256 of sent data. obstore gets ranges of 8 MiB with 8 threads.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        source = folder / "source" / "model.safetensors"
        source.parent.mkdir()
        size = write_llama(source, "--layers", "1")
        config = models.LLAMA_CONFIG | {"num_hidden_layers": 1}
        (source.parent / "config.json").write_text(json.dumps(config))
        run(shardconv("split", source, "--tp", "8", "-o", folder / "split"))
        for name, client, pairs, num_bytes in transfers(folder, SHARDCONV, ROUNDS):
            _, _, _, detail = _pair_row("", "", pairs, client)
            detail += f", {num_bytes / size:.3f} of the weights' bytes"
            rate = 1 / pairs.ratio
            yield Row(f"{name}, rate / {client}'s", "0.9 or more", f"{rate:.2f}", detail)
    finally:
        remove(folder)


def vllm_loading(place: Place) -> Iterator[Row]:
    """Loading a model into two vLLM workers, compared with vLLM's default loader; figures of the slower worker.

    Ratios are of seconds in ``load_weights`` with a warm page cache. Memory is warm: directly before a load, the files
    are read, and dropped from the page cache if it is to be cold. Bytes are those read from storage with a cold one.
    Memory is additional private memory, as a multiple of the size of the rank's model. The row with a hash loads,
    then reads and hashes the rank's file: the cost of a check that is apart from loading.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place.folder))
    try:
        forms = vllm.prepare(folder, running.write_model)
        found = dict(vllm.measure(forms, ROUNDS))
    finally:
        remove(folder)
    base = next(iter(found.values()))
    goals = {"shardconv, split, without verification": "1.0 or less"}
    for name, figures in found.items():
        detail = (
            f"warm {figures['seconds']:.2f} s, cold {figures['cold_seconds']:.2f} s; "
            f"read {figures['cold_bytes'] / 1e6:.0f} MB per worker, {figures['all_bytes'] / 1e6:.0f} MB by both; "
            f"memory {figures['memory_bytes'] / figures['model_bytes']:.2f} of the rank's "
            f"{figures['model_bytes'] / 1e6:.0f} MB"
        )
        yield Row(name, goals.get(name, "(none)"), f"{figures['seconds'] / base['seconds']:.2f}", detail)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="folder on a tmpfs [default: %(default)s]"
    )
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="folder on a disk [default: here]")
    parser.add_argument("--only", help="run only this benchmark, and replace its section")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair [default: %(default)s]")
    arguments = parser.parse_args()
    global ROUNDS  # noqa: PLW0603 - set once, before anything runs
    ROUNDS = arguments.rounds
    tmpfs, disk = Place("tmpfs", arguments.memory), Place("disk", arguments.disk)
    warm = Place("tmpfs, warm memory", arguments.memory, warm_bytes=4 * 10**9)
    plan: list[tuple[Callable[[Place], Iterator[Row]], tuple[Place, ...]]] = [
        (copying, (tmpfs, warm, disk)), (bounds, (warm,)), (hosts, (disk,)),
        (quantized, (warm,)), (adapters, (tmpfs,)),
        (pytorch_files, (tmpfs,)), (meta_files, (tmpfs,)), (megatron_files, (warm,)),
        (usual_script, (tmpfs,)), (checksums, (tmpfs,)),
        (resuming, (tmpfs,)), (memory, (tmpfs,)),
        (startup, (tmpfs,)), (planning, (tmpfs,)), (parallel_layers, (tmpfs,)), (loading_and_running, (tmpfs,)),
        (diffusion, (tmpfs,)), (loading_a_source, (disk,)), (remote, (tmpfs,)), (vllm_loading, (disk,)),
        (loading_on_a_gpu, (tmpfs,) if which("nvidia-smi") else ()),
    ]  # fmt: skip
    for benchmark, places in plan:
        if places and arguments.only in (None, benchmark.__name__):
            rows = []
            for place in places:
                for row in benchmark(place):
                    print(" | ".join(row), flush=True)
                    rows.append(row)
            _write_section(benchmark, rows, [benchmark.__name__ for benchmark, _ in plan])


def _write_section(benchmark: Callable[..., object], rows: list[Row], order: list[str]) -> None:
    """Replace the section of one benchmark in the results."""
    old = RESULTS.read_text() if RESULTS.exists() else ""
    sections = {text.partition("\n")[0]: text for text in old.split("\n## ")[1:]}
    what = inspect.cleandoc(benchmark.__doc__ or "")
    command = f"python -m benchmarks --only {benchmark.__name__} --rounds {ROUNDS}"
    machine = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
        f"{_gpu() if benchmark is loading_on_a_gpu else ''}"
    )
    lines = [
        benchmark.__name__,
        "",
        f"{what} Measured by `{command}` on {datetime.now(UTC):%Y-%m-%d}: {machine}.",
        "",
        "| claim | goal | measured | detail |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    sections[benchmark.__name__] = "\n".join(lines)
    parts = [_introduction(), *(sections[name].rstrip() for name in order if name in sections)]
    RESULTS.write_text("\n\n## ".join(parts) + "\n")


def _gpu() -> str:
    """The GPU of this machine and versions of packages, for the description of the machine."""
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    name, *_ = subprocess.check_output(query, text=True).splitlines()
    versions = (f"{package} {metadata.version(package)}" for package in ("torch", "transformers", "safetensors"))
    return f", {name}, {', '.join(versions)}"


def _introduction() -> str:
    gigabytes = sum(prod(shape) * 2 for _, shape in models.llama_tensors().values()) / 1e9
    return f"""# Results

`make bench` writes this file. It installs the requirements, and needs 12 GB in a tmpfs and on the disk.

The source of most rows is a bf16 file with Llama's names and shapes, of {gigabytes:.2f} GB with random bytes.
Times are from start to exit of a process, unless a section states otherwise. A ratio is the median over rounds in which
both commands run after each other, in alternating order, as absolute times vary on a shared machine. The disk is synced
before each command. GB and MB are powers of ten. Compare ratios within a section only: the
times of ``cp`` differ between sections."""


if __name__ == "__main__":
    main()
