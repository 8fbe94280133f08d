"""Models on hosts that have the files of their own ranks only, compared with the unsharded model."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardconv
from tests.support.checkpoints import DEMO
from tests.support.command import finish, start
from tests.support.forked import Popen
from tests.support.loading import check_fails, check_logits
from tests.support.torchrun import free_port, on_nodes

pytestmark = pytest.mark.timeout(240)


def split_on(source: Path, folder: Path, *hosts: str) -> list[Path]:
    """Split a source for four ranks on each of some hosts."""
    for number, ranks in enumerate(hosts):
        shardconv.split(source, folder / f"host{number}", tp=4, ranks=ranks)
    return [folder / f"host{number}" for number in range(len(hosts))]


def check_own_folder(axis, source, folders):
    check_logits(axis, "llama", source, folders[axis.rank // 2])


def test_each_host_has_its_ranks(ranks, source, tmp_path):
    """The source may have another name on each host."""
    copied = shutil.copytree(source, tmp_path / "copied")
    folders = [*split_on(source, tmp_path / "a", "0-1"), *split_on(copied, tmp_path / "b", "2-3")]
    ranks("four", check_own_folder, source, folders)


def check_refused(axis, folders, messages):
    check_fails(axis, folders[axis.rank // 2], messages)


def test_host_without_one_of_its_ranks(ranks, source, tmp_path):
    own = r"host1: does not have rank 2 \(got rank 3 of 4\): split the source on this host with the same .*ranks.2"
    folders = split_on(source, tmp_path, "0-1", "3")
    ranks("four", check_refused, folders, [f"rank 2: .*{own}", f"rank 2: .*{own}", f"^(?!rank).*{own}", own])


def test_hosts_with_different_sources(ranks, source, tmp_path):
    """The headers and auxiliary files are equal, the values are not."""
    other = shutil.copytree(source, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-100_000:] = bytes(100_000)
    (other / "model.safetensors").write_bytes(data)
    folders = [*split_on(source, tmp_path / "a", "0-1", "2"), *split_on(other, tmp_path / "b", "0", "2-3")]
    ranks("four", check_refused, [folders[0], folders[3]], ["checkpoints differ between ranks"])


def test_split_for_another_number_of_ranks_on_one_host_is_one_message(tmp_path):
    """The first rank reads a split for two ranks, the other one a split for four."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder, tp in zip(folders, (2, 4), strict=True):
        shardconv.split(DEMO, folder, tp=tp)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        start("run", folder, "--prompt", "a", "--device", "cpu", popen=Popen, env={**group, "RANK": str(rank)})
        for rank, folder in enumerate(folders)
    ]
    results = [finish(process) for process in processes]
    assert [result.code for result in results] == [1, 1], results
    messages = [result.err.count("shardconv: ") for result in results]
    assert messages == [0, 1], results
    assert "host1: is for 4 ranks, and there are 2 processes" in results[1].err


def test_run_on_two_hosts(tmp_path):
    """Two agents with two ranks each, as on two hosts; each host has a folder with its ranks. Only rank 0 prints."""
    folders, prompt = split_on(DEMO, tmp_path, "0-1", "2-3"), "The import statement"
    options = ["--prompt", prompt, "--max-new-tokens", "6", "--device", "cpu", "-q"]
    results = on_nodes(2, *(["-m", "shardconv", "run", folder, *options] for folder in folders))
    assert [result.code for result in results] == [0, 0], results
    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), AutoModelForCausalLM.from_pretrained(DEMO)
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) in results[0].out
    assert results[1].out == ""
