"""`shardconv run` in real processes that are also killed, with the demo model, which generates text."""

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
from safetensors.torch import load_file

import shardconv
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.commands.run import show_report
from shardconv.runtime.outputs import RunOptions
from shardconv.runtime.run import check_run, explain_errors, run_rank
from shardconv.support.console import Console
from shardconv.support.errors import RunError, ShardconvError, UsageError
from shardconv.support.launched import RENDEZVOUS
from tests.support.checkpoints import DEMO
from tests.support.command import ENVIRONMENT, call, finish, start
from tests.support.forked import Popen, run, run_python
from tests.support.matrix import MATRIX, cases
from tests.support.torch_files import write_pytorch
from tools.model_matrix.trial import model_class, small

PROMPT = "The import statement"
TOKENS = 12
pytestmark = pytest.mark.timeout(240)  # loaded machines are slow


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "demo-tp2"
    shardconv.split(DEMO, folder, tp=2)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A split for one rank, for tests that do not depend on tp, as each rank takes seconds to start."""
    folder = tmp_path_factory.mktemp("run") / "demo-tp1"
    shardconv.split(DEMO, folder, tp=1)
    return folder


def unsharded_texts(*prompts):
    """Continuations of the unsharded model, by transformers alone."""
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
    """The report of a single rank in this process."""
    return run_rank(path, [prompt], RunOptions(device="cpu", **options), lambda _: None)


def checked_and_run(path, options):
    """The report of a single rank after the checks that precede a run."""
    check_run(open_loadable(path, tp=None, options={}), [PROMPT], options)
    return run_rank(path, [PROMPT], options, lambda _: None)


def write_bert(folder, auto):
    """A small BERT with a small tokenizer."""
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
    """The descendants of a process."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in children_of(child)]


def ranks_of(process, seconds=120):
    """Rank to process id, once both ranks run."""
    end = time.monotonic() + seconds
    while len(ranks := dict(filter(None, map(rank_of, children_of(process.pid))))) < 2:
        assert process.poll() is None, "the launcher exited"
        assert time.monotonic() < end, "two ranks were not started"
        time.sleep(0.1)
    return ranks


def rank_of(pid):
    """The rank of a process, with its id; None if it is not (yet) a rank, or has exited."""
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


def test_text_equals_that_of_the_unsharded_model(split):
    result = run("run", split, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--device", "cpu", "--check", DEMO)
    assert result.code == 0, result.err
    assert result.out.rstrip("\n") == unsharded_texts(PROMPT)[0]
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
    assert report["outputs"] == unsharded_texts(*prompts)
    assert len(report["memory_bytes"]) == 2


TORCHRUN = ["-m", "torch.distributed.run"]


def test_joins_the_ranks_that_torchrun_started(split):
    options = ["--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--device", "cpu", "-q"]
    ranks = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardconv"]
    result = run_python(*ranks, "run", split, *options)
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, unsharded_texts(PROMPT)[0]), result.stderr


def test_other_number_of_processes_is_one_message_though_rank_0_is_the_last(split, tmp_path):
    """torchrun ends all processes when one exits, so the others must not exit before rank 0 has printed it."""
    program = tmp_path / "late.py"
    program.write_text(
        "import os, time\nfrom shardconv.runtime import ranks\ncheck = ranks._check_size\n"
        "def late(*arguments):\n    time.sleep(3 if os.environ['RANK'] == '0' else 0)\n    check(*arguments)\n"
        "ranks._check_size = late\nfrom shardconv.cli import main\nmain()\n"
    )
    ranks = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", program]
    result = run_python(*ranks, "run", split, "--prompt", PROMPT, "--device", "cpu")
    assert result.returncode == 1
    assert result.stderr.count("is for 2 ranks, and there are 3 processes") == 1, result.stderr


@MATRIX
def test_joins_ranks_of_two_nodes(split):
    """Two agents with one rank each, as on two hosts, meet on a port; only rank 0 prints."""
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
    assert [result.out.rstrip("\n") for result in results] == [unsharded_texts(PROMPT)[0], ""]


def test_source_that_is_not_split(split):
    """Started by the command, which prints the text that a split checkpoint gives."""
    options = ["--prompt", PROMPT, "--max-new-tokens", TOKENS, "--device", "cpu"]
    result = run("run", DEMO, "--tp", 2, *options, "--check", DEMO)
    assert (result.code, result.out.rstrip("\n")) == (0, unsharded_texts(PROMPT)[0]), result.err
    assert "2 ranks on cpu" in result.err
    assert "equal to the unsharded model in float32" in result.err


@pytest.mark.parametrize("name", ["model.pt", "weights.bin"])
def test_check_with_a_pytorch_file_that_transformers_does_not_find_names_the_commands(split, tmp_path, name):
    for file in ("config.json", name, "training_args.bin"):
        (tmp_path / file).write_text("{}")
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert f"holds {name}, which transformers does not load" in result.err
    assert f"shardconv split {tmp_path} --tp 1" in result.err


@MATRIX
def test_text_of_a_pytorch_file_equals_that_of_the_safetensors_file(tmp_path):
    source = shutil.copytree(DEMO, tmp_path / "demo")
    write_pytorch(source, load_file(DEMO / "model.safetensors"))
    (source / "model.safetensors").unlink()
    options = ["--prompt", PROMPT, "--max-new-tokens", TOKENS, "--device", "cpu", "-q"]
    result = run("run", source, "--tp", 2, *options)
    assert (result.code, result.out.rstrip("\n")) == (0, unsharded_texts(PROMPT)[0]), result.err


@MATRIX
def test_source_on_ranks_that_torchrun_started():
    options = ["--tp", "2", "--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--device", "cpu", "-q"]
    ranks = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardconv"]
    result = run_python(*ranks, "run", DEMO, *options)
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, unsharded_texts(PROMPT)[0]), result.stderr


def test_quantized_source_is_dequantized(tmp_path):
    """Options that choose the plan apply; the comparison is with the dequantized model."""
    source = Path(__file__).parents[1] / "data" / "quantized" / "gptq-3"
    options = ["--token-ids", "1 2 3 4", "--max-new-tokens", "2", "--device", "cpu", "--json", "--check", source]
    result = run("run", source, "--tp", 2, "--dequantize", "--replicate", "lm_head.weight", *options)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["differences"], report["error"] < 1e-5) == ([], True)
    assert any("lm_head.weight is replicated as requested" in note for note in report["notes"])


def test_difference_from_a_source_that_is_not_quantized_names_the_quantized_one(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    quantized = Path(__file__).parents[1] / "data" / "quantized" / "gptq-3"
    shardconv.split(quantized, tmp_path / "split", tp=1)
    config = AutoConfig.from_pretrained(quantized)
    del config.quantization_config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    options = RunOptions(device="cpu", check=tmp_path / "plain", dequantize=True, token_ids=True, max_new_tokens=2)
    report = run_rank(tmp_path / "split", ["1 2 3"], options, lambda _: None)
    remedy = f"{tmp_path / 'plain'} is not quantized: pass the quantized source that was split to --check"
    assert report.differences[0].endswith(f" are due to rounding. {remedy}")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["SPLIT", "--tp", 4], 2, "is split for 2 ranks (got --tp 4): remove --tp"),
        (["SPLIT", "--rules", "llama"], 2, "is a split checkpoint, which stores its plan: remove --rules"),
        (["DEMO", "--tp", 3], 1, "is not a multiple of 3"),
        (["DEMO"], 1, "or load it without splitting it: --tp N"),
        (["DEMO", "--tp", 2, "--dequantize"], 1, "is not quantized: remove --dequantize"),
        (["DEMO/nothing", "--tp", 2], 1, "does not exist"),
    ],
)
def test_source_and_split_options(split, arguments, code, message):
    """One error each, before ranks are started."""
    given = [str(one).replace("SPLIT", str(split)).replace("DEMO", str(DEMO)) for one in arguments]
    result = call("run", *given, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_check_with_rank_files_of_another_tool_names_the_merge(split, tmp_path):
    for name in ("config.json", "params.json", "consolidated.00.pth"):
        (tmp_path / name).write_text("{}")
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert "another tool (meta), which transformers does not load" in result.err
    assert f"merge them first (shardconv merge {tmp_path} -o DIR), and pass --check DIR" in result.err


def without_last_token(folder):
    """A copy of the demo model whose vocabulary lacks the last token."""
    from safetensors.torch import save_file  # noqa: PLC0415

    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size - 1}))
    tensors = load_file(DEMO / "model.safetensors")
    smaller = {name: tensor[:-1].clone() if len(tensor) == size else tensor for name, tensor in tensors.items()}
    save_file(smaller, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("is_split", [True, False])
def test_check_with_another_vocabulary_is_an_error_before_ranks_start(split, tmp_path, is_split):
    other = without_last_token(tmp_path / "other")
    source = [split] if is_split else [DEMO, "--tp", 2]
    result = call("run", *source, "--prompt", PROMPT, "--device", "cpu", "--check", other)
    assert (result.code, result.out) == (1, "")
    assert f"--check {other}: is another model (" in result.err
    assert "got shape [1998, 256], expected [1999, 256]" in result.err
    assert "pass the source that was split" in result.err


def test_check_with_tensors_of_another_model_counts_them(split, tmp_path):
    other = write_bert(tmp_path / "bert", "BertModel")
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", other)
    assert (result.code, result.out) == (1, "")
    assert re.search(r"bert: is another model \(of \d+ tensors, 39 are not in it, ", result.err), result.err


def test_check_accepts_another_dtype_and_the_names_of_another_prefix(split, tmp_path):
    """float32 is the dtype of the comparison, and transformers maps names of the model without its head."""
    from safetensors.torch import save_file  # noqa: PLC0415

    other = shutil.copytree(DEMO, tmp_path / "other")
    tensors = load_file(DEMO / "model.safetensors").items()
    tensors = {name.removeprefix("model."): tensor.double() for name, tensor in tensors}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert check_run(open_loadable(split, tp=None, options={}), [PROMPT], RunOptions(device="cpu", check=other)) == 2


def test_check_with_a_split_checkpoint_names_the_source_and_the_merge(split, single):
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", single)
    assert (result.code, result.out) == (1, "")
    assert f"--check {single}: is a split checkpoint (expected the unsharded model): pass the source" in result.err
    assert f"merge it first (shardconv merge {single} -o DIR)" in result.err


def test_check_with_the_name_of_a_hub_model_proposes_a_download_only(split):
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", "org/model")
    assert (result.code, "hf download org/model" in result.err, "hf://" in result.err) == (1, True, False)


CHAT = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}: The"


def test_chat_template(single, tmp_path):
    """A prompt is rendered by the checkpoint's template, with the generation prompt."""
    talking = shutil.copytree(single, tmp_path / "talking")
    (talking / "chat_template.jinja").write_text(CHAT)
    result = run("run", talking, "--prompt", PROMPT, "--chat", "--max-new-tokens", TOKENS, "--device", "cpu", "-q")
    expected = unsharded_texts(f"<user> {PROMPT}: The")[0]
    assert (result.code, result.out.rstrip("\n")) == (0, expected.rstrip("\n")), result.err
    with pytest.raises(RunError, match="does not have a chat template: run it without --chat"):
        rank_report(single, PROMPT, chat=True)


def test_without_a_config(split, tmp_path):
    """The message is printed once."""
    bare = shutil.copytree(split, tmp_path / "bare")
    (bare / "config.json").unlink()
    result = run("run", bare, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, "config.json" in result.err, result.err.count("\n")) == (1, True, 1), result.err


def test_check_finds_another_model(split, tmp_path):
    """The names and shapes are equal, but not the values."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    other = shutil.copytree(DEMO, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    result = run("run", split, "--prompt", PROMPT, "--max-new-tokens", "3", "--device", "cpu", "--check", other)
    assert (result.code, "DIFFERENT" in result.err, "logits differ by" in result.err) == (3, True, True)


@MATRIX
def test_sampled_tokens_depend_on_the_seed_only(split, single):
    """They are equal on one rank and on two."""
    options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--device", "cpu", "--temperature", "1.5", "-q"]
    text = run("run", split, *options, "--seed", 1).out.rstrip("\n")
    texts = [
        rank_report(single, PROMPT, max_new_tokens=8, temperature=1.5, seed=seed).outputs[0].rstrip("\n")
        for seed in (1, 2)
    ]
    assert text == texts[0] != texts[1]


def test_example_of_a_custom_module():
    example = DEMO.parent / "own_module.py"
    result = run_python(*TORCHRUN, "--standalone", "--nproc-per-node", "2", example)
    assert result.returncode == 0, result.stderr
    assert "(qkv): ColumnParallelLinear(in_features=32, out_features=96, bias=True, dim=-1, tp=2)" in result.stdout


def test_masked_language_model_fills_masks(tmp_path):
    source = write_bert(tmp_path / "bert", "BertForMaskedLM")
    shardconv.split(source, tmp_path / "split", tp=2)
    result = run("run", tmp_path / "split", "--prompt", "an [MASK] is", "--device", "cpu", "--check", source)
    assert result.code == 0, result.err
    assert re.fullmatch(r"\S+ 0\.\d{3}, .*", result.out.strip())
    assert "equal to the unsharded model in float32, for this input: outputs differ by at most " in result.err
    assert "greedy tokens" not in result.err


@MATRIX
def test_encoder_returns_embeddings(tmp_path):
    source = write_bert(tmp_path / "bert", "BertModel")
    shardconv.split(source, tmp_path / "split", tp=2)
    result = run("run", tmp_path / "split", "--prompt", "an exception", "--device", "cpu", "--check", source)
    assert result.code == 0, result.err
    assert len(json.loads(result.out)) == 32
    assert "equal to the unsharded model in float32, for this input: outputs differ by at most " in result.err


@pytest.mark.parametrize(("auto", "message"), [
    ("BertForMaskedLM", r"put \[MASK\] into each prompt"),
    ("BertForSequenceClassification", "neither text nor embeddings"),
    ("BertForQuestionAnswering", r"start_logits, end_logits.*neither text nor embeddings"),
])  # fmt: skip
def test_models_without_output_for_a_prompt(tmp_path, auto, message):
    shardconv.split(write_bert(tmp_path / "bert", auto), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=message):
        rank_report(tmp_path / "split", "an exception")


# --- errors ---------------------------------------------------------------------------------------------------------


def lines_of(err):
    return [line for line in err.splitlines() if line.startswith("shardconv: ")]


def test_rank_file_missing(split, tmp_path):
    folder = shutil.copytree(split, tmp_path / "split")
    (folder / "rank-1-of-2.safetensors").unlink()
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out) == (1, "")
    remedy = "copy it to this host, or split the source again"
    assert result.err == f"shardconv: {folder}/rank-1-of-2.safetensors: is missing: {remedy}\n"
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu", "--json")
    assert "rank-1-of-2.safetensors: is missing" in json.loads(result.out)["error"]


def test_rank_file_with_other_bytes(split, tmp_path):
    """Each rank checks its file, unless --no-verify is given; then a dtype may differ."""
    folder = shutil.copytree(split, tmp_path / "split")
    path = folder / "rank-1-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(
        r"shardconv: .*rank-1-of-2.safetensors: the bytes of .* differ from their checksum: copy it again, or .*\n",
        result.err,
    )
    options = ["--max-new-tokens", "4", "--no-verify", "--dtype", "bf16"]
    result = run("run", folder, "--prompt", PROMPT, "--device", "cpu", *options)
    assert (result.code, len(result.out) > 4) == (0, True), result.err


def test_errors_before_ranks_start(split, tmp_path):
    for options, code, message in (
        (["--prompt", " "], 2, "--prompt is empty"),
        (["--token-ids", "abc"], 2, "--token-ids: got 'abc', expected numbers"),
        (["--prompt", PROMPT, "--check", str(tmp_path / "nothing")], 1, "nothing: does not exist"),
    ):
        result = call("run", split, "--device", "cpu", *options)
        assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
        assert message in result.err


def test_prompts_that_are_not_utf8(single):
    result = call("run", single, "--device", "cpu", "--prompt", "caf\udce9")
    assert (result.code, result.err) == (2, "shardconv: prompt 1 is not UTF-8: convert it\n")
    for given, message in (
        (b"a list\ncaf\xe9\n", "prompt 2 is not UTF-8: convert it"),
        (b"\n", "no prompt given: pass "),
    ):
        result = run_python("-m", "shardconv", "run", single, "--device", "cpu", given=given, is_text=False)
        assert (result.returncode, message in result.stderr.decode()) == (2, True), result.stderr


@pytest.mark.parametrize(("file", "text", "message"), [
    ("config.json", "{", "is not JSON"),
    ("config.json", "[]", "JSON object"),
    ("config.json", None, "differs from the config that was split, in num_hidden_layers: restore it"),
    ("generation_config.json", "[]", "generation_config.json cannot be read"),
    ("chat_template.jinja", "{% for %}", "the chat template cannot be used: TemplateSyntaxError"),
])  # fmt: skip
def test_damaged_files(single, tmp_path, file, text, message):
    folder = shutil.copytree(single, tmp_path / "split")
    if text is None:  # it would load, but generate nonsense
        text = json.dumps({**json.loads((folder / file).read_text()), "num_hidden_layers": 2})
    (folder / file).write_text(text)
    options = RunOptions(device="cpu", chat=file == "chat_template.jinja", max_new_tokens=2)
    with pytest.raises(ShardconvError, match=message):
        checked_and_run(folder, options)


@pytest.mark.parametrize(("change", "message"), [
    ({"architectures": None}, r"does not name a model class of transformers \S+ \(got .* architectures None"),
    ({"architectures": ["LlamaConfig"]}, r"does not name a model class .* architectures \['LlamaConfig'\]"),
    ({"model_type": "nosuch"}, r"does not name a model class .*got model_type 'nosuch' [^\n]+$"),
    ({"hidden_act": "nosuch"}, "a LlamaForCausalLM cannot be built from config.json: KeyError: 'nosuch'"),
])  # fmt: skip
def test_configs_without_a_model(tmp_path, change, message):
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **change}))
    shardconv.split(source, tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=message):
        rank_report(tmp_path / "split", PROMPT)


def test_generation_is_greedy_despite_generation_config(single, tmp_path):
    """Beam search could not be streamed."""
    folder = shutil.copytree(single, tmp_path / "split")
    (folder / "generation_config.json").write_text('{"num_beams": 3}')
    assert list(rank_report(folder, PROMPT, max_new_tokens=TOKENS).outputs) == unsharded_texts(PROMPT)


@pytest.mark.parametrize(("damage", "message"), [
    ("model.safetensors", "cannot be loaded as a LlamaForCausalLM: "),
    ("config.json", "does not have a config.json: pass the folder of"),
])  # fmt: skip
def test_check_against_an_incomplete_checkpoint(single, tmp_path, damage, message):
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / damage).unlink()
    options = RunOptions(device="cpu", check=source, max_new_tokens=2)
    with pytest.raises(RunError, match=f"--check {source}: {message}"):
        checked_and_run(single, options)


def test_model_without_text_input(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(tmp_path / "vit")
    shardconv.split(tmp_path / "vit", tmp_path / "split", tp=1)
    with pytest.raises(RunError, match="a ViTForImageClassification reads pixel_values and not text"):
        rank_report(tmp_path / "split", "1 2", token_ids=True)


@pytest.mark.parametrize("model_type", ["clip", "blip"])
def test_model_that_does_not_run_on_text_alone(tmp_path, model_type):
    """CLIP does not have an input embedding by transformers' names, and BLIP has."""
    small(model_class("zero-shot image classification", model_type)).save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"reads image and text.*: call it from Python"):
        rank_report(tmp_path / "split", "1 2", token_ids=True)
    with pytest.raises(RunError, match=r"reads image and text.*: call it from Python"):
        rank_report(tmp_path / "split", "", token_ids=True, check=tmp_path / "source")


def test_several_prompts_are_labeled(single):
    result = run("run", single, "--prompt", PROMPT, "--prompt", "A list", "--device", "cpu", "--check", DEMO)
    assert result.code == 0, result.err
    assert re.fullmatch(rf"> {PROMPT}\n.+\n> A list\n.+", result.out, re.DOTALL)


@MATRIX
def test_quiet_prints_each_text(single):
    """One JSON string per line and prompt; a single text is printed as it is."""
    prompts, options = [PROMPT, "A list"], ["--max-new-tokens", TOKENS, "--device", "cpu", "-q"]
    result = run("run", single, *(one for prompt in prompts for one in ("--prompt", prompt)), *options)
    assert (result.code, result.err) == (0, "")
    assert [json.loads(line) for line in result.out.splitlines()] == unsharded_texts(*prompts)
    result = run("run", single, "--prompt", PROMPT, *options)
    assert (result.code, result.out, result.err) == (0, unsharded_texts(PROMPT)[0] + "\n", "")


def test_quiet_of_models_that_do_not_generate(tmp_path, capsys):
    """Their output is printed as without -q; with --json it is in the object."""
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


def test_quiet_keeps_warnings(single, tmp_path):
    """Warnings of a failed check, and of a prompt that is too long."""
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


def test_error_of_a_model_with_a_wrong_plan_file():
    for raised, plan_file, expected in (
        (RuntimeError("shape"), ("mine.toml", ""), (RunError, "the model does not run as mine.toml shards it: shape")),
        (RuntimeError("shape"), None, (RuntimeError, "^shape$")),
        (RuntimeError("Connection closed by peer"), ("mine.toml", ""), (RuntimeError, "^Connection")),
        (torch.OutOfMemoryError("full"), ("mine.toml", ""), (torch.OutOfMemoryError, "^full$")),
        (RunError("no mask"), ("mine.toml", ""), (RunError, "^no mask$")),
    ):
        with pytest.raises(expected[0], match=expected[1]), explain_errors(Path("split"), plan_file):
            raise raised


def test_warning_of_more_tokens_than_positions(single):
    notes = rank_report(single, "the " * 300, max_new_tokens=2).notes
    assert "tokens are more than the 256 that the model is made for" in notes[0]


def test_error_of_ranks_whose_peers_exited(split):
    """A connection error is reported only if no rank has another error."""
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
def test_text_requires_a_tokenizer(without_tokenizer, options):
    """The message is complete and comes before any process is started."""
    result = call("run", without_tokenizer, "--device", "cpu", *options)
    assert result == (1, "", NEEDS_TOKENIZER.format(without_tokenizer))


def unsharded_tokens(ids):
    """The unsharded model's continuation of token ids, by transformers alone."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    return tokens[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def checked_without_tokenizer(without_tokenizer) -> dict:
    """The report of a check without a prompt."""
    options = ["--max-new-tokens", TOKENS, "--device", "cpu", "--check", DEMO, "--json"]
    result = run("run", without_tokenizer, *options)
    assert result.code == 0, result.err
    return json.loads(result.out)


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_check_without_a_tokenizer_uses_fixed_ids_over_the_vocabulary(checked_without_tokenizer):
    (prompt,) = map(ids_of, checked_without_tokenizer["prompts"])
    assert (len(prompt), len(set(prompt)), min(prompt) > 2, max(prompt)) == (16, 16, True, 1998)
    assert any("compared on token ids over the whole vocabulary" in note for note in checked_without_tokenizer["notes"])


def test_check_without_a_tokenizer_reports_tokens_as_ids(checked_without_tokenizer):
    (prompt,) = map(ids_of, checked_without_tokenizer["prompts"])
    assert checked_without_tokenizer["outputs"] == [" ".join(map(str, unsharded_tokens(prompt)))]


def test_check_without_a_tokenizer_compares_with_the_unsharded_model(checked_without_tokenizer):
    report = checked_without_tokenizer
    assert (report["differences"], report["error"] < 1e-4) == ([], True)


def test_tokenizer_that_was_removed_after_the_split_is_noted(checked_without_tokenizer):
    assert any(note.startswith("tokenizer.json: is missing") for note in checked_without_tokenizer["notes"])


def test_token_ids_as_prompts(split):
    """Also with a tokenizer; padding of a batch does not change the results."""
    prompts = [[5, 6, 7], [1500]]
    options = [one for ids in prompts for one in ("--token-ids", ",".join(map(str, ids)))]
    result = run("run", split, *options, "--max-new-tokens", TOKENS, "--device", "cpu", "--dtype", "fp32", "-q")
    expected = [" ".join(map(str, unsharded_tokens(ids))) for ids in prompts]
    assert (result.code, result.out.splitlines(), result.err) == (0, expected, "")


@pytest.mark.parametrize(("ids", "error", "message"), [
    ("5 six", UsageError, "got '5 six', expected numbers"),
    ("5 1999", RunError, "1999 is not in the model's vocabulary of 1,999"),
])  # fmt: skip
def test_invalid_token_ids(single, ids, error, message):
    with pytest.raises(error, match=message):
        rank_report(single, ids, token_ids=True)


def test_options_that_contradict_each_other(split):
    for options, message in (
        (["--prompt", PROMPT, "--token-ids", "1"], "--token-ids replaces --prompt"),
        (["--chat", "--token-ids", "1"], "--token-ids replaces --chat"),
        (["--check", DEMO, "--dtype", "fp16"], "--check compares in float32 (got --dtype fp16)"),
    ):
        result = call("run", split, "--device", "cpu", *options)
        assert (result.code, result.out, message in result.err) == (2, "", True), result


def test_tokenizer_that_cannot_be_loaded(single, tmp_path):
    """The message has transformers' error in one line that is not truncated."""
    folder = shutil.copytree(single, tmp_path / "split")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(RunError, match=r"the tokenizer cannot be loaded: copy .* Got \S+: [^\n]+$"):
        rank_report(folder, PROMPT)


def test_tokenizer_without_a_vocabulary(tmp_path):
    """For some types transformers builds an empty one, which maps each word to the unknown token."""
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "split" / name).unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"the tokenizer does not have a vocabulary \(expected one of .*vocab.txt"):
        rank_report(tmp_path / "split", "an exception")


@MATRIX
def test_batch_of_an_encoder_equals_single_prompts(tmp_path):
    """Positions are counted from the first token, so the batch is padded on the right."""
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    prompts, options = ["an exception is raised", "an"], RunOptions(device="cpu")
    batch = run_rank(tmp_path / "split", prompts, options, lambda _: None).outputs
    for prompt, found in zip(prompts, batch, strict=True):
        (alone,) = rank_report(tmp_path / "split", prompt).outputs
        assert torch.allclose(torch.tensor(json.loads(found)), torch.tensor(json.loads(alone)), atol=1e-5)


def test_error_of_more_tokens_than_learned_positions(tmp_path):
    shardconv.split(write_bert(tmp_path / "bert", "BertModel"), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"512 positions \(embeddings.position_embeddings\).* up to 602: use a shorter"):
        rank_report(tmp_path / "split", "an " * 600)


@pytest.fixture
def without_config(tmp_path):
    """A split of a single file without a config, and the error."""
    bare = shutil.copyfile(DEMO / "model.safetensors", tmp_path / "bare.safetensors")
    shardconv.split(bare, tmp_path / "without", tp=1)
    message = (
        f"{tmp_path / 'without'}: does not have a config.json, which names the model's class: split the source again"
    )
    return tmp_path / "without", message


def test_split_without_a_config_is_not_run(without_config):
    """In Python, pass a module as ``model``."""
    folder, message = without_config
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, message in result.err, "--config FILE" in result.err) == (1, True, True)
    assert "shardconv.load(DIR, model=...)" in result.err


def test_split_without_a_config_is_not_loaded(without_config):
    folder, message = without_config
    with pytest.raises(RunError, match=re.escape(message)):
        shardconv.load(folder, device="cpu")


def test_split_of_a_single_file_with_a_config_requires_a_tokenizer(tmp_path):
    shardconv.split(DEMO / "model.safetensors", tmp_path / "with", tp=1, config=DEMO / "config.json")
    result = call("run", tmp_path / "with", "--prompt", PROMPT, "--device", "cpu")
    assert "does not have a tokenizer" in result.err


def test_rank_files_without_checksums_are_not_verified(tmp_path):
    """A warning reports it, also with -q."""
    shardconv.split(DEMO, tmp_path / "split", tp=1, checksums=False)
    result = run("run", tmp_path / "split", "--prompt", PROMPT, "--max-new-tokens", 2, "--device", "cpu", "-q")
    note = "the rank files were not verified: the split checkpoint does not have checksums\n"
    assert (result.code, result.err) == (0, note)


def test_tokenizer_of_another_model(tmp_path):
    """Its token ids exceed the embedding table."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    source = shutil.copytree(DEMO, tmp_path / "source")
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, head_dim=16
    )
    LlamaForCausalLM(config).save_pretrained(source)
    shardconv.split(source, tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"has token .* vocabulary has 16 tokens: this tokenizer belongs to another"):
        rank_report(tmp_path / "split", PROMPT)


def test_folder_that_is_not_a_split_checkpoint(tmp_path):
    result = call("run", tmp_path, "--prompt", PROMPT)
    assert (result.code, "is not a split checkpoint" in result.err) == (1, True)


@pytest.mark.parametrize("device", ["mps", "meta", "hpu", "gpu"])
def test_device_that_ranks_cannot_use(split, device):
    """The same error of run and of load."""
    result = call("run", split, "--prompt", PROMPT, "--device", device)
    with pytest.raises(UsageError) as caught:
        shardconv.load(DEMO, tp=1, device=device)
    assert (result.code, result.err.replace("--device cpu", 'device="cpu"')) == (2, f"shardconv: {caught.value}\n")


#: A rank that imports transformers after torch.distributed is initialized, and prints the remaining threads of gloo.
LEAVE = """
from pathlib import Path
from shardconv.runtime.launch import join, leave
join()
import transformers.models.llama.modeling_llama
leave()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc")
def test_no_thread_of_gloo_is_left_at_exit(tmp_path):
    """A thread that releases a message while the interpreter exits would abort the process (SIGABRT)."""
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{tmp_path}/rendezvous"}
    result = subprocess.run(  # not a forked process, which exits without the teardown of modules
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc")
@pytest.mark.parametrize(("seconds", "rank"), cases([(0, 1), (2, 0), (5, 1)], lambda seconds, rank: seconds == 2))
def test_killed_rank_is_reported(split, seconds, rank):
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc")
@pytest.mark.parametrize(
    ("sent", "code", "seconds"),
    cases(
        [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 2), (signal.SIGKILL, -9, 5), (signal.SIGKILL, -9, 0)],
        lambda _, code, seconds: (code, seconds) == (130, 2),
    ),
)
def test_terminated_by_a_signal(split, sent, code, seconds):
    process = start("run", split, "--prompt", PROMPT, "--max-new-tokens", "100000", "--device", "cpu")
    ranks = ranks_of(process)
    time.sleep(seconds)
    process.send_signal(sent)
    result = finish(process)
    assert result.code == code, result.err
    check_gone(ranks.values())
