"""Generate greedy tokens and their logprobs with vLLM's engine: ``generate.py FOLDER LOAD_FORMAT TP PP FILE``.

Writes JSON to FILE: the tokens of each prompt, and the largest logprobs of each token.
"""

import json
import os
import sys
from pathlib import Path

PROMPTS = ([1, 5, 9, 300], [7, 999, 2])
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}


def warm_up(worker):
    """Make the buffers of hidden states between stages, as vLLM's CPU build does only where it compiles."""
    worker.model_runner.profile_run()


def main(folder, load_format, tp, pp, file):
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment is set

    llm = LLM(
        model=folder, load_format=load_format, tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp),
        enforce_eager=True, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64,
        distributed_executor_backend="mp",
    )  # fmt: skip
    if int(pp) > 1:
        llm.collective_rpc(warm_up)
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=3, detokenize=False, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling)
    outputs = [one.outputs[0] for one in found]
    generated = [
        [list(one.token_ids), [{token: value.logprob for token, value in step.items()} for step in one.logprobs]]
        for one in outputs
    ]
    Path(file).write_text(json.dumps(generated))


if __name__ == "__main__":
    main(*sys.argv[1:])
