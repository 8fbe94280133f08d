"""Fixtures that several modules share."""

import os
import re
import signal
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Set before torch is imported: spinning threads of several processes on few cores slow each other down by a factor of
#: four.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec

import pytest

if find_spec("hypothesis"):  # not beside vLLM
    from hypothesis import settings

    settings.register_profile("shardconv", deadline=None)  # busy machines are slow
    settings.load_profile("shardconv")

pytest.register_assert_rewrite("tests.support")  # before its import, for detailed assertion messages

#: Tests in vLLM and Megatron-Core run separately: make test-vllm, make test-megatron. Tests of pages show costs, which
#: torch counts.
_SEPARATE = (("vllm", "engines/vllm"), ("sglang", "engines/sglang"), ("megatron", "megatron"), ("torch", "html"))
collect_ignore = [name for package, name in _SEPARATE if not find_spec(package)]

#: Packages of extras that are not installed: tests that import them are skipped, and the others run (make test-core).
_MISSING = {
    name for name in ("torch", "transformers", "safetensors", "tokenizers", "peft", "playwright") if not find_spec(name)
}
#: The packages of shardconv that work without extras: a missing package there is a failure.
_WITHOUT_EXTRAS = {"storage", "plan", "layouts", "formats", "checkpoint", "html"}

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module of tests that imports a missing package; test_layering.py shows which modules may."""
    report = yield
    missing = re.search(r"No module named '(\w+)'", str(report.longrepr)) if report.failed else None
    if missing and missing[1] in _MISSING:
        report.outcome, report.longrepr = "skipped", (__file__, 0, f"Skipped: {missing[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that imports a missing package, or calls a function that may."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, ModuleNotFoundError) and error.name in _MISSING:
        _, *folders = call.excinfo.traceback[-1].path.as_posix().rpartition("/shardconv/")[2].split("/")[::-1]
        if _WITHOUT_EXTRAS.isdisjoint(folders):
            report.outcome, report.longrepr = "skipped", (__file__, 0, f"Skipped: {error}")
    return report


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Path]:
    """Write the checkpoint of a tiny model of models.py, once per name for all processes that run tests."""
    from tests.support.models import MODELS  # noqa: PLC0415 - transformers takes seconds to import

    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "checkpoints"
    shared.mkdir(exist_ok=True)

    @cache
    def write(name: str) -> Path:
        if not (shared / name).exists():
            written = MODELS[name].write(tmp_path_factory.mktemp(name))
            with suppress(OSError):  # another process was faster
                written.rename(shared / name)
        return shared / name

    return write


@pytest.fixture(scope="module")
def source_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the checkpoint of one of the KINDS of a module, once."""
    return cache(lambda kind: request.module.KINDS[kind].write(tmp_path_factory.mktemp("sources") / "source"))


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that this process launches, to save their imports: see support/forked.py."""
    from tests.support import forked  # noqa: PLC0415 - likewise

    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    monkeypatch.setattr(f"{handler}.Popen", forked.Popen)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run a check on four processes, see ranks.py; started per module, as idle groups take time."""
    from tests.support.ranks import ranks_in  # noqa: PLC0415 - for tests of layers only

    with ranks_in(tmp_path_factory.mktemp("ranks")) as run:
        yield run
