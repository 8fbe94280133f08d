"""`shardconv run` in real processes that are also killed, with the demo model, which generates text."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.commands.run import show_report
from shardconv.runtime.outputs import RunOptions
from shardconv.runtime.run import check_run, explain_errors, run_rank
from shardconv.support.console import Console
from shardconv.support.errors import RunError, ShardconvError, UsageError
from shardconv.support.launched import RENDEZVOUS
from tests.support.checkpoints import DEMO
from tests.support.command import ENVIRONMENT, call, finish, start, wait_until
from tests.support.damage import flip
from tests.support.forked import run, run_python
from tests.support.matrix import MATRIX, cases
from tests.support.models import change_config
from tests.support.torchrun import on_one_node
from tools.model_matrix.trial import model_class, small

PROMPT = "The import statement"
TOKENS = 12
GPTQ = Path(__file__).parents[1] / "data" / "quantized" / "gptq-3"
#: Options of each run whose text is compared with that of the unsharded model.
OPTIONS = ["--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--device", "cpu"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc")
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
    from transformers import AutoTokenizer  # noqa: PLC0415 - other tests need none

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokens = (unsharded_tokens(tokenizer(prompt)["input_ids"], dtype="auto") for prompt in prompts)
    return [tokenizer.decode(one, skip_special_tokens=True) for one in tokens]


def unsharded_tokens(ids, dtype=torch.float32):
    """The unsharded model's continuation of token ids, by transformers alone."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    return tokens[0, len(ids) :].tolist()


def rank_report(path, prompt, **options):
    """The report of a single rank in this process."""
    return run_rank(path, [prompt], RunOptions(device="cpu", **options), lambda _: None)


def checked_report(path, prompt, **options):
    """The same, after the checks that precede a run."""
    check_run(open_loadable(path, tp=None, options={}), [prompt] * bool(prompt), RunOptions(device="cpu", **options))
    return rank_report(path, prompt, **options)


def change_tensors(folder, change):
    """Replace the tensors of a checkpoint."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_bert(folder, auto="BertModel"):
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


def split_bert(folder, auto="BertModel", tp=1):
    shardconv.split(write_bert(folder / auto, auto), folder / f"{auto}-split", tp=tp)
    return folder / f"{auto}-split"


# --- text -----------------------------------------------------------------------------------------------------------


def test_text_equals_that_of_the_unsharded_model(split):
    """So does that of a source that is not split."""
    (expected,) = unsharded_texts(PROMPT)
    for source in ([split], [DEMO, "--tp", 2]):
        result = run("run", *source, *OPTIONS, "--check", DEMO)
        assert (result.code, result.out.rstrip("\n")) == (0, expected), result.err
        for words in (
            "2 ranks on cpu", "loaded in", "peak memory", "first token after", "tokens/s",
            "equal to the unsharded model in float32, for this input: outputs differ by at most ",
            " of the largest; greedy tokens are equal",
        ):  # fmt: skip
            assert words in result.err


def test_prompts_from_stdin_in_one_batch(split):
    prompts = [PROMPT, "A list is"]
    result = run_python("-m", "shardconv", "run", split, *OPTIONS[2:], "--json", given="\n".join(prompts))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["prompts"], report["outputs"]) == (prompts, unsharded_texts(*prompts))
    assert len(report["memory_bytes"]) == 2


def test_other_number_of_processes_is_one_message_though_rank_0_is_the_last(split, tmp_path):
    """torchrun ends all processes when one exits, so the others must not exit before rank 0 has printed it."""
    program = tmp_path / "late.py"
    program.write_text(
        "import os, time\nfrom shardconv.runtime import ranks\ncheck = ranks._check_size\n"
        "def late(*arguments):\n    time.sleep(3 if os.environ['RANK'] == '0' else 0)\n    check(*arguments)\n"
        "ranks._check_size = late\nfrom shardconv.cli import main\nmain()\n"
    )
    result = finish(on_one_node(3, program, "run", split, "--prompt", PROMPT, "--device", "cpu"))
    assert (result.code, result.err.count("is for 2 ranks, and there are 3 processes")) == (1, 1), result.err


def test_chat_template(single, tmp_path):
    """A prompt is rendered by the checkpoint's template, with the generation prompt."""
    talking = shutil.copytree(single, tmp_path / "talking")
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}: The"
    (talking / "chat_template.jinja").write_text(template)
    result = run("run", talking, *OPTIONS, "--chat", "-q")
    expected = unsharded_texts(f"<user> {PROMPT}: The")[0]
    assert (result.code, result.out.rstrip("\n")) == (0, expected.rstrip("\n")), result.err


@pytest.mark.parametrize("field", ["num_beams", "prompt_lookup_num_tokens"])
def test_generation_is_greedy_despite_generation_config(single, tmp_path, field):
    """Beam search could not be streamed; prompt lookup computes the scores of several tokens at once."""
    folder = shutil.copytree(single, tmp_path / "split")
    (folder / "generation_config.json").write_text(json.dumps({field: 3}))
    assert list(rank_report(folder, PROMPT, max_new_tokens=TOKENS).outputs) == unsharded_texts(PROMPT)


@MATRIX
def test_sampled_tokens_depend_on_the_seed_only(split, single):
    """They are equal on one rank and on two."""
    options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--device", "cpu", "--temperature", "1.5", "-q"]
    text = run("run", split, *options, "--seed", 1).out.rstrip("\n")
    reports = [rank_report(single, PROMPT, max_new_tokens=8, temperature=1.5, seed=seed) for seed in (1, 2)]
    texts = [report.outputs[0].rstrip("\n") for report in reports]
    assert text == texts[0] != texts[1]


def test_several_prompts_are_labeled(single):
    result = run("run", single, "--prompt", PROMPT, "--prompt", "A list", "--device", "cpu", "--check", DEMO)
    assert result.code == 0, result.err
    assert re.fullmatch(rf"> {PROMPT}\n.+\n> A list\n.+", result.out, re.DOTALL)


@MATRIX
def test_quiet_prints_each_text(single):
    """One JSON string per line and prompt; a single text is printed as it is."""
    result = run("run", single, *OPTIONS, "--prompt", "A list", "-q")
    assert (result.code, result.err) == (0, "")
    assert [json.loads(line) for line in result.out.splitlines()] == unsharded_texts(PROMPT, "A list")
    assert run("run", single, *OPTIONS, "-q") == (0, unsharded_texts(PROMPT)[0] + "\n", "")


def test_quiet_keeps_warnings(single, tmp_path):
    """Warnings of a failed check, and of a prompt that is too long."""
    other = shutil.copytree(DEMO, tmp_path / "other")
    change_tensors(other, lambda tensors: {name: tensor * 1.5 for name, tensor in tensors.items()})
    options = ["--prompt", "the " * 300, "--max-new-tokens", 2, "--device", "cpu", "-q", "--check", other]
    result = run("run", single, *options)
    assert result.code == 3
    assert "tokens are more than the 256 that the model is made for" in result.err
    assert "differs: logits differ by" in result.err


def test_rank_files_without_checksums_are_not_verified(tmp_path):
    """A warning reports it, also with -q."""
    shardconv.split(DEMO, tmp_path / "split", tp=1, checksums=False)
    result = run("run", tmp_path / "split", "--prompt", PROMPT, "--max-new-tokens", 2, "--device", "cpu", "-q")
    note = "the rank files were not verified: the split checkpoint does not have checksums\n"
    assert (result.code, result.err) == (0, note)


def test_example_of_a_custom_module():
    result = finish(on_one_node(2, DEMO.parent / "own_module.py"))
    assert result.code == 0, result.err
    assert "(qkv): ColumnParallelLinear(in_features=32, out_features=96, bias=True, dim=-1, tp=2)" in result.out


# --- token ids ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_tokenizer(single, tmp_path_factory):
    folder = shutil.copytree(single, tmp_path_factory.mktemp("run") / "without-tokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    return folder


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_check_without_a_tokenizer_uses_fixed_ids_over_the_vocabulary(without_tokenizer):
    """The outputs are ids, too, and equal those of the unsharded model; a note names the missing tokenizer."""
    result = run("run", without_tokenizer, *OPTIONS[2:], "--check", DEMO, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    (prompt,) = map(ids_of, report["prompts"])
    assert (len(prompt), len(set(prompt)), min(prompt) > 2, max(prompt)) == (16, 16, True, 1998)
    assert [*map(ids_of, report["outputs"])] == [unsharded_tokens(prompt)]
    assert (report["differences"], report["error"] < 1e-4) == ([], True)
    notes = "\n".join(report["notes"])
    assert "tokenizer.json: is missing" in notes
    assert "compared on token ids over the whole vocabulary" in notes


def test_token_ids_as_prompts(split):
    """Also with a tokenizer; padding of a batch does not change the results."""
    prompts = [[5, 6, 7], [1500]]
    options = [one for ids in prompts for one in ("--token-ids", ",".join(map(str, ids)))]
    result = run("run", split, *options, *OPTIONS[2:], "--dtype", "fp32", "-q")
    expected = [" ".join(map(str, unsharded_tokens(ids))) for ids in prompts]
    assert (result.code, result.out.splitlines(), result.err) == (0, expected, "")


def test_only_generated_tokens_are_printed_for_an_encoder_and_decoder(tmp_path):
    """Without the token that the decoder starts with, which transformers returns before them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "t5")
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert expected.shape == (1, 5)
    options = ["--token-ids", "5 6 7", "--max-new-tokens", "4", "--device", "cpu", "--dtype", "fp32", "-q"]
    result = run("run", tmp_path / "t5", "--tp", "1", *options)
    assert (result.code, result.out.split()) == (0, [str(number) for number in expected[0, 1:].tolist()]), result.err


def test_quantized_source_is_dequantized():
    """Options that choose the plan apply; the comparison is with the dequantized model."""
    options = ["--token-ids", "1 2 3 4", "--max-new-tokens", "2", "--device", "cpu", "--json", "--check", GPTQ]
    result = run("run", GPTQ, "--tp", 2, "--dequantize", "--replicate", "lm_head.weight", *options)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["differences"], report["error"] < 1e-5) == ([], True)
    assert any("lm_head.weight is replicated as requested" in note for note in report["notes"])


# --- other models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "prompt", "output"),
    cases(
        [
            ("BertForMaskedLM", "an [MASK] is", r"\S+ 0\.\d{3}, .*"),
            ("BertModel", "an exception", r"\[(\S+, ){31}\S+\]"),
        ],
        lambda auto, *_: auto == "BertForMaskedLM",
    ),
)
def test_models_that_do_not_generate(tmp_path, auto, prompt, output):
    """They fill masks, or compute an embedding, as the unsharded model does."""
    folder = split_bert(tmp_path, auto, tp=2)
    result = run("run", folder, "--prompt", prompt, "--device", "cpu", "--check", tmp_path / auto)
    assert result.code == 0, result.err
    assert re.fullmatch(output, result.out.strip())
    assert "equal to the unsharded model in float32, for this input: outputs differ by at most " in result.err
    assert "greedy tokens" not in result.err


def test_quiet_of_models_that_do_not_generate(tmp_path, capsys):
    """Their output is printed as without -q; with --json it is in the object."""
    for auto, prompt in (("BertForMaskedLM", "an [MASK] is"), ("BertModel", "an exception")):
        report = rank_report(split_bert(tmp_path, auto), prompt)
        capsys.readouterr()
        shown = {}
        for quiet, as_json in ((False, False), (True, False), (True, True)):
            show_report(report, Console(as_json=as_json, quiet=quiet), is_text=True, temperature=0.0)
            shown[quiet, as_json] = capsys.readouterr()
        assert shown[False, False].out == shown[True, False].out == report.outputs[0] + "\n"
        assert json.loads(shown[True, True].out)["outputs"] == list(report.outputs)
        assert ("peak memory" in shown[False, False].err, shown[True, False].err) == (True, "")


@MATRIX
def test_batch_of_an_encoder_equals_single_prompts(tmp_path):
    """Positions are counted from the first token, so the batch is padded on the right."""
    folder, prompts = split_bert(tmp_path), ["an exception is raised", "an"]
    batch = run_rank(folder, prompts, RunOptions(device="cpu"), lambda _: None).outputs
    for prompt, found in zip(prompts, batch, strict=True):
        (alone,) = rank_report(folder, prompt).outputs
        assert torch.allclose(torch.tensor(json.loads(found)), torch.tensor(json.loads(alone)), atol=1e-5)


# --- errors of --check ----------------------------------------------------------------------------------------------


def with_files(folder, names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")


def without_last_token(folder):
    """A copy of the demo model whose vocabulary lacks the last token."""
    shutil.copytree(DEMO, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    change_config(folder, {"vocab_size": size - 1})
    change_tensors(
        folder, lambda tensors: {name: one[:-1].clone() if len(one) == size else one for name, one in tensors.items()}
    )


def split_here(folder):
    shardconv.split(DEMO, folder, tp=1)


#: The folder of --check, and parts of the error, in which OTHER is its path.
WRONG_CHECKS = {
    "nothing": (lambda _: None, ["--check OTHER: does not exist"]),
    "no config": (
        partial(shutil.copytree, DEMO, ignore=shutil.ignore_patterns("config.json")),
        ["--check OTHER: does not have a config.json: pass the folder of"],
    ),
    **{
        name: (
            partial(with_files, names=("config.json", name, "training_args.bin")),
            [f"holds {name}, which transformers does not load", "shardconv split OTHER --tp 1"],
        )
        for name in ("model.pt", "weights.bin")
    },
    "rank files": (
        partial(with_files, names=("config.json", "params.json", "consolidated.00.pth")),
        [
            "another tool (meta), which transformers does not load",
            "merge them first (shardconv merge OTHER -o DIR), and pass --check DIR",
        ],
    ),
    "another vocabulary": (
        without_last_token,
        [
            "--check OTHER: is another model (",
            "got shape [1998, 256], expected [1999, 256]",
            "pass the source that was",
        ],
    ),
    "another model": (write_bert, ["other: is another model (of ", " tensors, 39 are missing, "]),
    "a split checkpoint": (
        split_here,
        [
            "--check OTHER: is a split checkpoint (expected the unsharded model): pass the source",
            "merge it first (shardconv merge OTHER -o DIR)",
        ],
    ),
}


@pytest.mark.parametrize("what", WRONG_CHECKS)
def test_check_against_another_folder_is_an_error_before_ranks_start(split, tmp_path, what):
    make, parts = WRONG_CHECKS[what]
    make(tmp_path / "other")
    for source in ([split], [DEMO, "--tp", 2]) if what == "another vocabulary" else ([split],):
        result = call("run", *source, "--prompt", PROMPT, "--device", "cpu", "--check", tmp_path / "other")
        assert (result.code, result.out) == (1, "")
        assert [part for part in parts if part.replace("OTHER", str(tmp_path / "other")) not in result.err] == []


def test_check_with_the_name_of_a_hub_model_proposes_a_download_only(split):
    result = call("run", split, "--prompt", PROMPT, "--device", "cpu", "--check", "org/model")
    assert (result.code, "hf download org/model" in result.err, "hf://" in result.err) == (1, True, False)


def test_check_accepts_another_dtype_and_the_names_of_another_prefix(split, tmp_path):
    """float32 is the dtype of the comparison, and transformers maps names of the model without its head."""
    other = shutil.copytree(DEMO, tmp_path / "other")
    change_tensors(
        other, lambda tensors: {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    )
    assert check_run(open_loadable(split, tp=None, options={}), [PROMPT], RunOptions(device="cpu", check=other)) == 2


def test_check_against_an_incomplete_checkpoint(single, tmp_path):
    source = shutil.copytree(DEMO, tmp_path / "source", ignore=shutil.ignore_patterns("model.safetensors"))
    with pytest.raises(RunError, match=f"--check {source}: cannot be loaded as a LlamaForCausalLM: "):
        rank_report(single, PROMPT, check=source, max_new_tokens=2)


def test_difference_from_a_source_that_is_not_quantized_names_the_quantized_one(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    shardconv.split(GPTQ, tmp_path / "split", tp=1)
    config = AutoConfig.from_pretrained(GPTQ)
    del config.quantization_config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    options = {"check": tmp_path / "plain", "dequantize": True, "token_ids": True, "max_new_tokens": 2}
    report = rank_report(tmp_path / "split", "1 2 3", **options)
    remedy = f"{tmp_path / 'plain'} is not quantized: pass the quantized source that was split to --check"
    assert report.differences[0].endswith(f" are due to rounding. {remedy}")


# --- errors before ranks start --------------------------------------------------------------------------------------

NEEDS_TOKENIZER = (
    "without-tokenizer: does not have a tokenizer: copy the model's tokenizer files (tokenizer.json, "
    'tokenizer_config.json, ...) into the folder, pass token ids by --token-ids "1 2 3", or pass --check without '
    "a prompt\n"
)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["SPLIT", "--tp", 4], 2, "is split for --tp 2 (got --tp 4): remove it"),
        (["SPLIT", "--tp", 2, "--ep", 4], 2, "is split for --tp 2 (got --ep 4): remove it"),
        (["SPLIT", "--rules", "llama"], 2, "is a split checkpoint, which stores its plan: remove --rules"),
        (["DEMO", "--tp", 3], 1, "is not a multiple of 3"),
        (["DEMO"], 1, "or load it without splitting it: --tp N"),
        (["DEMO", "--tp", 2, "--dequantize"], 1, "is not quantized: remove --dequantize"),
        (["DEMO/nothing", "--tp", 2], 1, "does not exist"),
        (["EMPTY"], 1, "is not a split checkpoint"),
        (["SPLIT", "--token-ids", "1"], 2, "--token-ids replaces --prompt"),
        (["SPLIT", "--check", "DEMO", "--dtype", "fp16"], 2, "--check compares in float32 (got --dtype fp16)"),
        (["WITHOUT"], 1, NEEDS_TOKENIZER),
        (["WITHOUT", "--check", "DEMO"], 1, NEEDS_TOKENIZER),
    ],
)
def test_options_that_contradict_the_checkpoint(split, without_tokenizer, tmp_path, arguments, code, message):
    folders = {"SPLIT": split, "DEMO": DEMO, "WITHOUT": without_tokenizer, "EMPTY": tmp_path}
    given = [re.sub("[A-Z]{4,}", lambda name: str(folders[name[0]]), str(one)) for one in arguments]
    result = call("run", *given, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, result.out, message in result.err) == (code, "", True), result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", " "], "no prompt given: pass "),
        (["--token-ids", "abc"], "--token-ids: got 'abc', expected numbers"),
        (["--token-ids", "5 six"], "--token-ids: got '5 six', expected numbers"),
        (["--token-ids", "5 " + "9" * 5000], f"--token-ids: {'9' * 40} is not in the vocabulary of any model"),
        (["--chat", "--token-ids", "1"], "--token-ids replaces --chat"),
        (["--prompt", "caf\udce9"], "prompt 1 is not UTF-8: convert it"),
    ],
)
def test_wrong_prompts(split, options, message):
    result = call("run", split, "--device", "cpu", *options)
    assert (result.code, result.out, result.err.count("\n"), message in result.err) == (2, "", 1, True), result.err


@pytest.mark.parametrize(
    ("given", "message"),
    [(b"a list\ncaf\xe9\n", "prompt 2 is not UTF-8: convert it"), (b"\n", "no prompt given: pass ")],
)
def test_wrong_prompts_on_stdin(single, given, message):
    result = run_python("-m", "shardconv", "run", single, "--device", "cpu", given=given, is_text=False)
    assert (result.returncode, message in result.stderr.decode()) == (2, True), result.stderr


@pytest.mark.parametrize("device", ["mps", "meta", "hpu", "gpu"])
def test_device_that_ranks_cannot_use(split, device):
    """The same error of run and of load."""
    result = call("run", split, "--prompt", PROMPT, "--device", device)
    with pytest.raises(UsageError) as caught:
        shardconv.load(DEMO, tp=1, device=device)
    assert (result.code, result.err.replace("--device cpu", 'device="cpu"')) == (2, f"shardconv: {caught.value}\n")


def test_split_without_a_config(tmp_path):
    """Neither run nor loaded, unless one is passed; then its text needs a tokenizer."""
    bare = shutil.copyfile(DEMO / "model.safetensors", tmp_path / "bare.safetensors")
    folder = tmp_path / "without"
    shardconv.split(bare, folder, tp=1)
    message = f"{folder}: does not have a config.json, which names the model's class: split the source again"
    result = call("run", folder, "--prompt", PROMPT, "--device", "cpu")
    assert (result.code, message in result.err, "--config FILE" in result.err) == (1, True, True)
    assert ("shardconv.load(DIR, model=...)" in result.err, result.err.count("\n")) == (True, 1)
    with pytest.raises(RunError, match=re.escape(message)):
        shardconv.load(folder, device="cpu")
    shardconv.split(bare, tmp_path / "with", tp=1, config=DEMO / "config.json")
    assert "does not have a tokenizer" in call("run", tmp_path / "with", "--prompt", PROMPT, "--device", "cpu").err


# --- errors of ranks ------------------------------------------------------------------------------------------------


def test_rank_file_with_other_bytes(split, tmp_path):
    """With --no-verify, it runs, in any dtype; test_load.py has the error without it."""
    folder = shutil.copytree(split, tmp_path / "split")
    flip(folder / "rank-1-of-2.safetensors")
    options = ["--max-new-tokens", "4", "--no-verify", "--dtype", "bf16"]
    result = run("run", folder, "--prompt", PROMPT, "--device", "cpu", *options)
    assert (result.code, len(result.out) > 4) == (0, True), result.err


def demo(folder, *, change=None, **texts):
    """A split of the demo model, with another config or other texts in its files."""
    source = shutil.copytree(DEMO, folder / "source")
    change_config(source, change or {})
    shardconv.split(source, folder / "split", tp=1)
    for name, text in texts.items():
        (folder / "split" / name.replace("__", ".")).write_text(text)
    return folder / "split"


def without_vocabulary(folder):
    split = split_bert(folder)
    for name in ("tokenizer.json", "vocab.txt"):
        (split / name).unlink(missing_ok=True)
    return split


def split_small(folder, kind, model_type, base=None):
    """A split of a small model, with the other files of ``base``."""
    source = shutil.copytree(base, folder / "source") if base else folder / "source"
    small(model_class(kind, model_type)).save_pretrained(source)
    shardconv.split(source, folder / "split", tp=1)
    return folder / "split"


text_and_image = partial(split_small, kind="zero-shot image classification")
IDS = {"token_ids": True}
CONFIG = (DEMO / "config.json").read_text()
#: The checkpoint, the prompt, the options and the error.
REFUSED = {
    "no chat template": (demo, PROMPT, {"chat": True}, "does not have a chat template: run it without --chat"),
    "damaged template": (
        partial(demo, chat_template__jinja="{% for %}"), PROMPT, {"chat": True},
        "the chat template cannot be used: TemplateSyntaxError",
    ),
    "text as config": (partial(demo, config__json="{"), PROMPT, {}, "is not JSON"),
    "list as config": (partial(demo, config__json="[]"), PROMPT, {}, "JSON object"),
    "other config": (  # it would load, but generate nonsense
        partial(demo, config__json=CONFIG.replace('"num_hidden_layers": ', '"num_hidden_layers": 1')), PROMPT, {},
        "differs from the config that was split, in num_hidden_layers: restore it",
    ),
    "generation config": (
        partial(demo, generation_config__json="[]"), PROMPT, {}, "generation_config.json cannot be read"
    ),
    "no class": (
        partial(demo, change={"architectures": None}), PROMPT, {},
        r"does not name a model class of transformers \S+ \(got .* architectures None",
    ),
    "config as class": (
        partial(demo, change={"architectures": ["LlamaConfig"]}), PROMPT, {},
        r"does not name a model class .* architectures \['LlamaConfig'\]",
    ),
    "unknown type": (
        partial(demo, change={"model_type": "nosuch"}), PROMPT, {},
        r"does not name a model class .*got model_type 'nosuch' [^\n]+$",
    ),
    "unknown function": (
        partial(demo, change={"hidden_act": "nosuch"}), PROMPT, {},
        "a LlamaForCausalLM cannot be built from config.json: KeyError: 'nosuch'",
    ),
    "damaged tokenizer": (  # transformers' error in one line that is not truncated
        partial(demo, tokenizer__json='{"version": '), PROMPT, {},
        r"the tokenizer cannot be loaded \(got \S+: [^\n]+\): copy the model's tokenizer files [^\n]+$",
    ),
    "no vocabulary": (  # for some types transformers builds an empty one, which maps each word to the unknown token
        without_vocabulary, "an exception", {},
        r"the tokenizer does not have a vocabulary \(expected one of .*vocab.txt",
    ),
    "another tokenizer": (
        partial(split_small, kind="text generation", model_type="llama", base=DEMO), PROMPT, {},
        r"has token .* vocabulary has 99 tokens: this tokenizer belongs to another",
    ),
    "id": (demo, "5 1999", IDS, "has token 1999, and the model's vocabulary has 1,999"),
    "positions": (
        split_bert, "an " * 600, {}, r"512 positions \(embeddings.position_embeddings\).* up to 602: use a shorter"
    ),
    "no mask": (
        partial(split_bert, auto="BertForMaskedLM"), "an exception", {}, r"put \[MASK\] into each prompt"
    ),
    "classes": (
        partial(split_bert, auto="BertForSequenceClassification"), "an exception", {}, "neither text nor embeddings",
    ),
    "answers": (
        partial(split_bert, auto="BertForQuestionAnswering"), "an exception", {},
        r"start_logits, end_logits.*neither text nor embeddings",
    ),
    "images": (
        partial(split_small, kind="image classification", model_type="vit"), "1 2", IDS,
        "a ViTForImageClassification reads pixel_values and not text",
    ),
    "clip": (  # it does not have an input embedding by transformers' names, and BLIP has
        partial(text_and_image, model_type="clip"), "1 2", IDS, r"reads image and text.*: call it from Python",
    ),
    "blip": (partial(text_and_image, model_type="blip"), "1 2", IDS, r"reads image and text.*: call it from Python"),
    "clip without a prompt": (
        partial(text_and_image, model_type="clip"), "", {**IDS, "check": True},
        r"reads image and text.*: call it from Python",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_models_and_prompts_that_do_not_run(tmp_path, what):
    make, prompt, options, message = REFUSED[what]
    folder, given = make(tmp_path), {"max_new_tokens": 2, **options}
    if "check" in options:
        given["check"] = tmp_path / "source"
    with pytest.raises(ShardconvError, match=message):
        checked_report(folder, prompt, **given)


@pytest.mark.parametrize(
    ("raised", "plan_file", "expected", "message"),
    [
        (RuntimeError("shape"), "mine.toml", RunError, "the model does not run as mine.toml shards it: shape"),
        (RuntimeError("shape"), None, RuntimeError, "^shape$"),
        (RuntimeError("Connection closed by peer"), "mine.toml", RuntimeError, "^Connection"),
        (torch.OutOfMemoryError("full"), "mine.toml", torch.OutOfMemoryError, "^full$"),
        (RunError("no mask"), "mine.toml", RunError, "^no mask$"),
    ],
)
def test_error_of_a_model_with_a_wrong_plan_file(raised, plan_file, expected, message):
    with pytest.raises(expected, match=message), explain_errors(Path("split"), plan_file and (plan_file, "")):
        raise raised


def test_error_of_ranks_whose_peers_exited(split):
    """A connection error is reported only if no rank has another error."""
    result = run("run", split, "--prompt", PROMPT, "--device", "cpu", env={"GLOO_DEVICE_TRANSPORT": "NONE"})
    assert (result.code, result.err.count("shardconv: ")) == (1, 1)


# --- processes ------------------------------------------------------------------------------------------------------


def children_of(pid):
    """The descendants of a process."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in children_of(child)]


def ranks_of(process):
    """Rank to process id, once both ranks run."""

    def found():
        assert process.poll() is None, "the launcher exited"
        ranks = dict(filter(None, map(rank_of, children_of(process.pid))))
        return len(ranks) == 2 and ranks

    return wait_until(found)


def rank_of(pid):
    """The rank of a process, with its id; None if it is not (yet) a rank, or has exited."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
    return found and (int(found[1]), pid)


def check_gone(pids):
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)


#: A rank that imports transformers after torch.distributed is initialized, and prints the remaining threads of gloo.
LEAVE = """
from pathlib import Path
from shardconv.runtime.launch import join, leave
join()
import transformers.models.llama.modeling_llama
leave()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


@needs_proc
def test_no_thread_of_gloo_is_left_at_exit(tmp_path):
    """A thread that releases a message while the interpreter exits would abort the process (SIGABRT)."""
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{tmp_path}/rendezvous"}
    result = subprocess.run(  # not a forked process, which exits without the teardown of modules
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@needs_proc
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
    lines = [line for line in result.err.splitlines() if line.startswith("shardconv: ")]
    assert lines[-1:] == [f"shardconv: rank {rank} was killed by SIGKILL; the other ranks were terminated"]


@needs_proc
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


@needs_proc
def test_a_second_signal_while_ranks_are_terminated(split):
    """timeout(1) sends SIGTERM to the process, and to its group."""
    process = start("run", split, "--prompt", PROMPT, "--max-new-tokens", "100000", "--device", "cpu")
    ranks = ranks_of(process)
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    result = finish(process)
    assert (result.code, "internal error" in result.err) == (143, False), result.err
    check_gone(ranks.values())
