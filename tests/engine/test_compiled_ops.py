"""A lock left by a killed build, another build under way, no compiler: a sentence, and never an endless wait."""

import os
import time

import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_stochdpo import ConfigError, StochDPOConfig, initialize
from ds_stochdpo.engine import compiled_ops
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("single_process")

CPU_ADAM = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {}},
}
"""A DeepSpeed JSON that asks for a compiled optimizer."""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Where the lock of the op lies, in a cache of its own and a process that has not loaded it yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-compiler-here")
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def start():
    initialize(model=tiny_llama(), config=StochDPOConfig(), deepspeed=CPU_ADAM)


def test_an_old_lock_ends_the_start_with_its_path_and_the_remedy(lock):
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(ConfigError, match=rf"cpu_adam is locked by {lock}, which is 60 minutes old.*delete that file"):
        start()
    assert lock.exists()


class Clock:
    """Time passes only in `sleep`."""

    def __init__(self):
        self.now = time.time()

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, _):
        self.now += 60


def test_a_lock_that_grows_old_while_it_is_waited_for_ends_the_start(lock, monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(compiled_ops, "time", clock)
    lock.touch()
    os.utime(lock, (clock.now, clock.now))
    with pytest.raises(ConfigError, match=r"cpu_adam is locked by .* 16 minutes old"), compiled_ops.guarded_builds():
        CPUAdamBuilder().load()
    waits = [r.getMessage() for r in caplog.records if "waiting for another build" in r.getMessage()]
    assert len(waits) == 1
    assert str(lock) in waits[0]
    assert "delete that file" in waits[0]


def test_a_build_that_ends_is_waited_for(lock, monkeypatch):
    loaded = []
    monkeypatch.setattr(OpBuilder, "jit_load", lambda builder, verbose=True: loaded.append(builder.name))
    lock.touch()
    monkeypatch.setattr(compiled_ops.time, "sleep", lambda _: lock.unlink())
    with compiled_ops.guarded_builds():
        CPUAdamBuilder().load()
    assert loaded == ["cpu_adam"]


def test_without_a_compiler_the_op_and_the_way_around_it_are_named(lock):
    with pytest.raises(ConfigError, match=r"op cpu_adam.*cannot be compiled.*no-compiler-here.*torch_adam"):
        start()


def test_other_errors_pass_unchanged():
    with pytest.raises(KeyError, match="mine"), compiled_ops.guarded_builds():
        raise KeyError("mine")
