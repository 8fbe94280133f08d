"""`shardconv run` as users start it: real processes, real kills, and the demo model, which generates text."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardconv
from shardconv.commands.run import show_report
from shardconv.console import Console
from shardconv.errors import RunError, ShardconvError
from shardconv.runtime.launch import RENDEZVOUS
from shardconv.runtime.run import RunOptions, check_run, explain_errors, run_rank
from tests.support.command import ENVIRONMENT, call, finish, start
from tests.support.forked import Popen, run, run_python

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
PROMPT = "The import statement"
TOKENS = 12
pytestmark = pytest.mark.timeout(240)  # machines are busy


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "demo-tp2"
    shardconv.split(DEMO, folder, tp=2)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """For one rank, where it does not matter how many there are: each takes seconds to start."""
    folder = tmp_path_factory.mktemp("run") / "demo-tp1"
    shardconv.split(DEMO, folder, tp=1)
    return folder


def plain_texts(*prompts):
    """The continuation of the unsharded model, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - other tests need none

    tokenizer = AutoTokenizer.from_pretrained(DEMO, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        texts.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def rank_report(path, prompt, **options):
    """What one rank by itself says, in this process."""
    return run_rank(path, [prompt], RunOptions(device="cpu", **options), lambda _: None)


def checked_and_run(path, options):
    """What one rank by itself says after the checks before it."""
    check_run(path, [PROMPT], options)
    return run_rank(path, [PROMPT], options, lambda _: None)


def write_bert(folder, auto):
    """A small BERT with a tokenizer of the few words that are needed."""
    import transformers  # noqa: PLC0415

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "an", "exception", "is", "raised"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    getattr(transformers, auto)(config).save_pretrained(folder)
    return folder


def children_of(pid):
    """The processes that a process started, and they did."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in children_of(child)]


def ranks_of(process, seconds=120):
    """Rank to process of those that it started, once both are there."""
    end = time.monotonic() + seconds
    while len(ranks := dict(filter(None, map(rank_of, children_of(process.pid))))) < 2:
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "it did not start two"
        time.sleep(0.1)
    return ranks


def rank_of(pid):
    """The rank that a process is, and the process; None if it is none, is none yet, or is gone."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
    return found and (int(found[1]), pid)


def check_gone(pids, seconds=30):
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a process was left behind"
        time.sleep(0.1)


def test_text_is_the_unsplit_models(split):
    result = run("run", split, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--device", "cpu", "--check", DEMO)
    assert result.code == 0, result.err
    assert result.out.rstrip("\n") == plain_texts(PROMPT)[0]
    for words in (
        "2 ranks on cpu",
        "loaded in",
        "peak memory",
        "first token after",
        "tokens/s",
        "equal to the unsharded model in float32, for this input: outputs differ by at most ",
        " of the largest; greedy tokens are equal",
    ):
        assert words in result.err


def test_prompts_from_stdin_in_one_batch(split):
    prompts = [PROMPT, "A list is"]
    options = ["--max-new-tokens", str(TOKENS), "--device", "cpu", "--json"]
    result = run_python("-m", "shardconv", "run", split, *options, given="\n".join(prompts))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prompts"] == prompts
    assert report["outputs"] == plain_texts(*prompts)
    assert len(report["memory_bytes"]) == 2


TORCHRUN = ["-m", "torch.distributed.run"]


def test_joins_the_ranks_that_torchrun_started(split):
    options = ["--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--device", "cpu", "-q"]
    ranks = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardconv"]
    result = run_python(*ranks, "run", split, *options)
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, plain_texts(PROMPT)[0]), result.stderr


def test_joins_ranks_of_two_nodes(split):
    """Two agents with a rank each, as on two hosts: they meet on a port, and only rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--nnodes", "2", "--nproc-per-node", "1"]
    options = ["--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--device", "cpu", "-q"]
    nodes = [
        Popen(
            [sys.executable, *TORCHRUN, *address, "--node-rank", str(node), "-m", "shardconv", "run", split, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )
        for node in range(2)
    ]  # fmt: skip
    results = [finish(node) for node in nodes]
    assert [result.code for result in results] == [0, 0], results
    assert [result.out.rstrip("\n") for result in results] == [plain_texts(PROMPT)[0], ""]


CHAT = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}: The"


def test_chat_template(single, tmp_path):
    """A prompt is put into the checkpoint's own template, which is asked for the model's turn."""
    talking = shutil.copytree(single, tmp_path / "talking")
    (talking / "chat_template.jinja").write_text(CHAT)
    result = run("run", talking, "--prompt", PROMPT, "--chat", "--max-new-tokens", TOKENS, "--device", "cpu", "-q")
    expected = plain_texts(f"<user> {PROMPT}: The")[0]
    assert (result.code, result.out.rstrip("\n")) == (0, expected.rstrip("\n")), result.err
    with pytest.raises(RunError, match="does not have a chat template: run it without --chat"):
        rank_report(single, PROMPT, chat=True)


def test_without_a_config(split, tmp_path):
    """What all ranks say is said once."""
    bare = shutil.copytree(split, tmp_path / "bare")
    (bare / "config.json").unlink()
    result = run("run", bare, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, "config.json" in result.err, result.err.count("\n")) == (1, True, 1), result.err


def test_another_model_is_told_apart(split, tmp_path):
    """The same names and shapes, other numbers."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    other = shutil.copytree(DEMO, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    result = run("run", split, "--prompt", PROMPT, "--max-new-tokens", "3", "--device", "cpu", "--check", other)
    assert (result.code, "DIFFERENT" in result.err, "logits differ by" in result.err) == (3, True, True)


def test_drawn_tokens_follow_the_seed(split, single):
    """On one rank and on two, which all draw the same."""
    options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--device", "cpu", "--temperature", "1.5", "-q"]
    text = run("run", split, *options, "--seed", 1).out.rstrip("\n")
    texts = [
        rank_report(single, PROMPT, max_new_tokens=8, temperature=1.5, seed=seed).outputs[0].rstrip("\n")
        for seed in (1, 2)
    ]
    assert text == texts[0] != texts[1]


def test_example_of_an_own_module():
    example = DEMO.parent / "own_module.py"
    result = run_python(*TORCHRUN, "--standalone", "--nproc-per-node", "2", example)
    assert result.returncode == 0, result.stderr
    assert "ColumnParallelLinear(in_features=32, out_features=96, bias=True, dim=-1, tp=2)" in result.stdout


def test_masks_are_filled_in(tmp_path):
    source = write_bert(tmp_path / "bert", "BertForMaskedLM")
    shardconv.split(source, tmp_path / "split", tp=2)
    result = run("run", tmp_path / "split", "--prompt", "an [MASK] is", "--device", "cpu", "--check", source)
    assert result.code == 0, result.err
    assert re.fullmatch(r"\S+ 0\.\d{3}, .*", result.out.strip())
    assert "equal to the unsharded model in float32, for this input: outputs differ by at most " in result.err
    assert "greedy tokens" not in result.err


def test_embeddings(tmp_path):
    source = write_bert(tmp_path / "bert", "BertModel")
    shardconv.split(source, tmp_path / "split", tp=2)
    result = run("run", tmp_path / "split", "--prompt", "an exception", "--device", "cpu", "--check", source)
    assert result.code == 0, result.err
    assert len(json.loads(result.out)) == 32
    assert "equal to the unsharded model in float32, for this input: outputs differ by at most " in result.err


@pytest.mark.parametrize(("auto", "said"), [
    ("BertForMaskedLM", r"put \[MASK\] into each prompt"),
    ("BertForSequenceClassification", "neither text nor embeddings"),
])  # fmt: skip
def test_models_that_have_no_answer(tmp_path, auto, said):
    shardconv.split(write_bert(tmp_path / "bert", auto), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=said):
        rank_report(tmp_path / "split", "an exception")


# --- what goes wrong ------------------------------------------------------------------------------------------------


def lines_of(err):
    return [line for line in err.splitlines() if line.startswith("shardconv: ")]


def test_rank_file_missing(split, tmp_path):
    folder = shutil.copytree(split, tmp_path / "split")
    (folder / "rank-1-of-2.safetensors").unlink()
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"shardconv: {folder}/rank-1-of-2.safetensors: is missing\n"
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu", "--json")
    assert "rank-1-of-2.safetensors: is missing" in json.loads(result.out)["error"]


def test_rank_file_with_other_bytes(split, tmp_path):
    """Each rank checks its file, unless that is not wanted; what it then reads may be of another dtype."""
    folder = shutil.copytree(split, tmp_path / "split")
    path = folder / "rank-1-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(
        r"shardconv: .*rank-1-of-2.safetensors: the bytes of .* differ from their checksum\n", result.err
    )
    options = ["--max-new-tokens", "4", "--no-verify", "--dtype", "bfloat16"]
    result = run("run", folder, "--prompt", PROMPT, "--device", "cpu", *options)
    assert (result.code, len(result.out) > 4) == (0, True), result.err


def test_what_is_wrong_before_anything_starts(split, tmp_path):
    for options, said in (
        (["--prompt", " "], "--prompt is empty"),
        (["--prompt", PROMPT, "--check", str(tmp_path / "nothing")], "nothing: is not a folder"),
    ):
        result = call("run", split, "--device", "cpu", *options)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert said in result.err


def test_prompts_that_are_not_text(single):
    result = call("run", single, "--device", "cpu", "--prompt", "caf\udce9")
    assert (result.code, result.err) == (1, "shardconv: prompt 1 is not UTF-8: convert it\n")
    for given, said in (
        (b"a list\ncaf\xe9\n", "prompt 2 is not UTF-8: convert it"),
        (b"\n", "there is no prompt: pass "),
    ):
        result = run_python("-m", "shardconv", "run", single, "--device", "cpu", given=given, is_text=False)
        assert (result.returncode, said in result.stderr.decode()) == (1, True), result.stderr


@pytest.mark.parametrize(("file", "text", "said"), [
    ("config.json", "{", "is not JSON"),
    ("config.json", "[]", "JSON object"),
    ("config.json", None, "differs from the config that was split, in num_hidden_layers: restore it"),
    ("generation_config.json", "[]", "generation_config.json cannot be read"),
    ("chat_template.jinja", "{% for %}", "the chat template cannot be used: TemplateSyntaxError"),
])  # fmt: skip
def test_damaged_files(single, tmp_path, file, text, said):
    folder = shutil.copytree(single, tmp_path / "split")
    if text is None:  # which would load, and give nonsense
        text = json.dumps({**json.loads((folder / file).read_text()), "num_hidden_layers": 2})
    (folder / file).write_text(text)
    options = RunOptions(device="cpu", chat=file == "chat_template.jinja", max_new_tokens=2)
    with pytest.raises(ShardconvError, match=said):
        checked_and_run(folder, options)


@pytest.mark.parametrize(("change", "said"), [
    ({"architectures": None}, r"does not name a model class of transformers \S+ \(got .* architectures None"),
    ({"architectures": ["LlamaConfig"]}, r"does not name a model class .* architectures \['LlamaConfig'\]"),
    ({"model_type": "nosuch"}, r"does not name a model class .*got model_type 'nosuch' [^\n]+$"),
    ({"hidden_act": "nosuch"}, "a LlamaForCausalLM cannot be built from config.json: KeyError: 'nosuch'"),
])  # fmt: skip
def test_configs_that_no_model_is_built_from(tmp_path, change, said):
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **change}))
    shardconv.split(source, tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=said):
        rank_report(tmp_path / "split", PROMPT)


def test_generation_is_greedy_whatever_generation_config_says(single, tmp_path):
    """Beam search would not be, and could not be printed as it comes."""
    folder = shutil.copytree(single, tmp_path / "split")
    (folder / "generation_config.json").write_text('{"num_beams": 3}')
    assert list(rank_report(folder, PROMPT, max_new_tokens=TOKENS).outputs) == plain_texts(PROMPT)


@pytest.mark.parametrize(("damage", "said"), [
    ("model.safetensors", "cannot be loaded as a LlamaForCausalLM: "),
    ("config.json", "does not have a config.json: pass the folder of"),
])  # fmt: skip
def test_a_check_against_what_is_not_complete(single, tmp_path, damage, said):
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / damage).unlink()
    options = RunOptions(device="cpu", check=source, max_new_tokens=2)
    with pytest.raises(RunError, match=f"--check {source}: {said}"):
        checked_and_run(single, options)


def test_a_model_that_reads_no_text(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(tmp_path / "vit")
    shardconv.split(tmp_path / "vit", tmp_path / "split", tp=1)
    with pytest.raises(RunError, match="a ViTForImageClassification reads pixel_values and not text"):
        rank_report(tmp_path / "split", "1 2", token_ids=True)


def test_several_prompts_are_told_apart(single):
    result = run("run", single, "--prompt", PROMPT, "--prompt", "A list", "--device", "cpu", "--check", DEMO)
    assert result.code == 0, result.err
    assert re.fullmatch(rf"> {PROMPT}\n.+\n> A list\n.+", result.out, re.DOTALL)


def test_quiet_prints_each_text(single):
    """A JSON string on a line for each prompt, and nothing else; a single text as it is."""
    prompts, options = [PROMPT, "A list"], ["--max-new-tokens", TOKENS, "--device", "cpu", "-q"]
    result = run("run", single, *(one for prompt in prompts for one in ("--prompt", prompt)), *options)
    assert (result.code, result.err) == (0, "")
    assert [json.loads(line) for line in result.out.splitlines()] == plain_texts(*prompts)
    result = run("run", single, "--prompt", PROMPT, *options)
    assert (result.code, result.out, result.err) == (0, plain_texts(PROMPT)[0] + "\n", "")


def test_quiet_of_models_that_generate_nothing(tmp_path, capsys):
    """What there is instead of text is printed as without -q; with --json it is in the object."""
    for auto, prompt in (("BertForMaskedLM", "an [MASK] is"), ("BertModel", "an exception")):
        shardconv.split(write_bert(tmp_path / auto, auto), tmp_path / f"{auto}-tp1", tp=1)
        report = rank_report(tmp_path / f"{auto}-tp1", prompt)
        capsys.readouterr()
        shown = {}
        for quiet, as_json in ((False, False), (True, False), (True, True)):
            show_report(report, Console(as_json=as_json, quiet=quiet), is_text=True, temperature=0.0)
            shown[quiet, as_json] = capsys.readouterr()
        assert shown[False, False].out == shown[True, False].out == report.outputs[0] + "\n"
        assert json.loads(shown[True, True].out)["outputs"] == list(report.outputs)
        assert ("peak memory" in shown[False, False].err, shown[True, False].err) == (True, "")


def test_quiet_does_not_silence_warnings(single, tmp_path):
    """Of a check that found differences, and of a prompt that is too long."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    other = shutil.copytree(DEMO, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, other / "model.safetensors")
    options = ["--prompt", "the " * 300, "--max-new-tokens", 2, "--device", "cpu", "-q", "--check", other]
    result = run("run", single, *options)
    assert (result.code, "tokens are more than the 256" in result.err, "DIFFERENT  logits" in result.err) == (
        3,
        True,
        True,
    )


def test_a_model_that_a_plan_file_cut_wrong():
    for raised, plan_file, expected in (
        (RuntimeError("shape"), ("mine.toml", ""), (RunError, "the model does not run as mine.toml shards it: shape")),
        (RuntimeError("shape"), None, (RuntimeError, "^shape$")),
        (RuntimeError("Connection closed by peer"), ("mine.toml", ""), (RuntimeError, "^Connection")),
        (torch.OutOfMemoryError("full"), ("mine.toml", ""), (torch.OutOfMemoryError, "^full$")),
        (RunError("no mask"), ("mine.toml", ""), (RunError, "^no mask$")),
    ):
        with pytest.raises(expected[0], match=expected[1]), explain_errors(Path("split"), plan_file):
            raise raised


def test_more_tokens_than_positions(single):
    notes = rank_report(single, "the " * 300, max_new_tokens=2).notes
    assert "tokens are more than the 256 that the model is made for" in notes[0]


def test_ranks_that_only_others_ended(split):
    """What looks like the fault of another is said where nobody says more."""
    result = run("run", split, "--prompt", PROMPT, "--device", "cpu", env={"GLOO_DEVICE_TRANSPORT": "NONE"})
    assert (result.code, result.err.count("shardconv: ")) == (1, 1)


@pytest.fixture(scope="module")
def without_tokenizer(single, tmp_path_factory):
    folder = shutil.copytree(single, tmp_path_factory.mktemp("run") / "without-tokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    return folder


NEEDS_TOKENIZER = (
    "shardconv: {}: does not have a tokenizer, which text needs: copy the model's tokenizer files (tokenizer.json, "
    'tokenizer_config.json, ...) into the folder, or give token ids: --token-ids "1 2 3". --check without a prompt '
    "needs no tokenizer.\n"
)


@pytest.mark.parametrize("options", [["--prompt", PROMPT], ["--prompt", PROMPT, "--check", DEMO], []])
def test_text_without_a_tokenizer(without_tokenizer, options):
    """The message is complete and comes before any process is started."""
    result = call("run", without_tokenizer, "--device", "cpu", *options)
    assert result == (1, "", NEEDS_TOKENIZER.format(without_tokenizer))


def plain_tokens(ids):
    """The token ids with which the unsplit model continues others, by transformers alone."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    return tokens[0, len(ids) :].tolist()


def test_a_check_without_a_tokenizer(without_tokenizer):
    """On token ids in the vocabulary's range, the same ones each time; tokens are reported as ids."""
    options = ["--max-new-tokens", TOKENS, "--device", "cpu", "--check", DEMO, "--json"]
    result = run("run", without_tokenizer, *options)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    (prompt,) = ([int(word) for word in text.split()] for text in report["prompts"])
    assert (len(prompt), len(set(prompt)), min(prompt) > 2, max(prompt)) == (16, 16, True, 1998)
    assert report["outputs"] == [" ".join(map(str, plain_tokens(prompt)))]
    assert (report["differences"], report["error"] < 1e-4) == ([], True)
    assert any("compared on token ids over the whole vocabulary" in note for note in report["notes"])
    assert any(note.startswith("tokenizer.json: is missing") for note in report["notes"])  # it was there at the split


def test_token_ids(split):
    """Also where there is a tokenizer; prompts of different lengths do not change each other."""
    prompts = [[5, 6, 7], [1500]]
    options = [one for ids in prompts for one in ("--token-ids", ",".join(map(str, ids)))]
    result = run("run", split, *options, "--max-new-tokens", TOKENS, "--device", "cpu", "--dtype", "float32", "-q")
    expected = [" ".join(map(str, plain_tokens(ids))) for ids in prompts]
    assert (result.code, result.out.splitlines(), result.err) == (0, expected, "")


@pytest.mark.parametrize(("ids", "said"), [
    ("5 six", "got '5 six', expected numbers"),
    ("5 1999", "1999 is not in the model's vocabulary of 1,999"),
])  # fmt: skip
def test_token_ids_that_are_wrong(single, ids, said):
    with pytest.raises(RunError, match=said):
        rank_report(single, ids, token_ids=True)


def test_options_that_contradict_each_other(split):
    for options, said in (
        (["--prompt", PROMPT, "--token-ids", "1"], "--token-ids replaces --prompt"),
        (["--chat", "--token-ids", "1"], "--token-ids replaces --chat"),
        (["--check", DEMO, "--dtype", "float16"], "--check compares in float32 (got --dtype float16)"),
    ):
        result = call("run", split, "--device", "cpu", *options)
        assert (result.code, result.out, said in result.err) == (2, "", True), result


def test_a_tokenizer_that_cannot_be_loaded(single, tmp_path):
    """The message names what transformers found, in one line that is not cut off."""
    folder = shutil.copytree(single, tmp_path / "split")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(RunError, match=r"the tokenizer cannot be loaded: copy .* Got \S+: [^\n]+$"):
        rank_report(folder, PROMPT)


def test_a_tokenizer_without_a_vocabulary(tmp_path):
    """For some types transformers makes an empty one, to which each word is unknown."""
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "split" / name).unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"the tokenizer has no vocabulary \(expected one of .*vocab.txt"):
        rank_report(tmp_path / "split", "an exception")


def test_a_batch_of_an_encoder_gives_what_each_prompt_gives(tmp_path):
    """Positions are counted from the first token: padding comes behind it."""
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    prompts, options = ["an exception is raised", "an"], RunOptions(device="cpu")
    batch = run_rank(tmp_path / "split", prompts, options, lambda _: None).outputs
    for prompt, found in zip(prompts, batch, strict=True):
        (alone,) = rank_report(tmp_path / "split", prompt).outputs
        assert torch.allclose(torch.tensor(json.loads(found)), torch.tensor(json.loads(alone)), atol=1e-5)


def test_more_tokens_than_learned_positions(tmp_path):
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"512 positions \(embeddings.position_embeddings\).* up to 602: use a shorter"):
        rank_report(tmp_path / "split", "an " * 600)


def test_a_bare_file_is_not_run(tmp_path):
    """It names no class; its own module is loaded with ``model``."""
    shardconv.split(DEMO / "model.safetensors", tmp_path / "with", tp=1, config=DEMO / "config.json")
    bare = shutil.copyfile(DEMO / "model.safetensors", tmp_path / "bare.safetensors")
    shardconv.split(bare, tmp_path / "without", tp=1)
    said = f"{tmp_path / 'without'}: does not have a config.json, which names the model's class: split the source again"
    result = call("run", tmp_path / "without", "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, said in result.err, "--config FILE" in result.err) == (1, True, True)
    assert "shardconv.load(DIR, model=...)" in result.err
    with pytest.raises(RunError, match=re.escape(said)):
        shardconv.load(tmp_path / "without", device="cpu")
    result = call("run", tmp_path / "with", "--prompt", PROMPT, "--device", "cpu")
    assert "does not have a tokenizer" in result.err


def test_without_checksums_nothing_is_verified(tmp_path):
    """Which is said, also with -q."""
    shardconv.split(DEMO, tmp_path / "split", tp=1, checksums=False)
    result = run("run", tmp_path / "split", "--prompt", PROMPT, "--max-new-tokens", 2, "--device", "cpu", "-q")
    assert (result.code, result.err) == (0, "the rank files were not verified: the split checkpoint has no checksums\n")


def test_the_tokenizer_of_another_model(tmp_path):
    """It makes tokens that the model has no rows for."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    source = shutil.copytree(DEMO, tmp_path / "source")
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, head_dim=16
    )
    LlamaForCausalLM(config).save_pretrained(source)
    shardconv.split(source, tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"has token .* vocabulary has 16 tokens: this tokenizer belongs to another"):
        rank_report(tmp_path / "split", PROMPT)


def test_no_split_checkpoint(tmp_path):
    result = call("run", tmp_path, "--prompt", PROMPT)
    assert (result.code, "is not a split checkpoint" in result.err) == (1, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there(split):
    result = call("run", split, "--prompt", PROMPT, "--device", "cuda")
    assert (result.code, result.err) == (1, "shardconv: there is no CUDA device here: use --device cpu\n")


#: A rank that imports transformers when torch.distributed runs, as ranks do, and says which of gloo's threads are left.
ENDED = """
from pathlib import Path
from shardconv.runtime.launch import join, leave
join()
import transformers.models.llama.modeling_llama
leave()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc which threads there are")
def test_no_thread_is_left_at_the_end(tmp_path):
    """One that still lets go of a message while the interpreter ends would end the process by SIGABRT."""
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{tmp_path}/rendezvous"}
    result = subprocess.run(
        [sys.executable, "-c", ENDED], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc which processes there are")
@pytest.mark.parametrize(("seconds", "rank"), [(0, 1), (2, 0), (5, 1)])
def test_a_rank_is_killed(split, seconds, rank):
    """While it starts, loads, or generates."""
    process = start("run", split, "--prompt", PROMPT, "--max-new-tokens", "100000", "--device", "cpu")
    ranks = ranks_of(process)
    time.sleep(seconds)
    os.kill(ranks[rank], signal.SIGKILL)
    began = time.monotonic()
    result = finish(process)
    assert time.monotonic() - began < 30
    assert result.code != 0
    check_gone(ranks.values())
    assert lines_of(result.err)[-1:] == [
        f"shardconv: rank {rank} was killed by SIGKILL; the other ranks were terminated"
    ]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc which processes there are")
@pytest.mark.parametrize(
    ("sent", "code", "seconds"),
    [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 2), (signal.SIGKILL, -9, 5), (signal.SIGKILL, -9, 0)],
)
def test_ended_from_outside(split, sent, code, seconds):
    process = start("run", split, "--prompt", PROMPT, "--max-new-tokens", "100000", "--device", "cpu")
    ranks = ranks_of(process)
    time.sleep(seconds)
    process.send_signal(sent)
    result = finish(process)
    assert result.code == code, result.err
    check_gone(ranks.values())
