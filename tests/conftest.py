"""What every test shares: few threads, no network, and one process group of one process."""

import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tokenised pairs are kept there; removed when the tests end.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="datasets-")

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def nothing_stays():
    yield
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"])


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture
def plain_linear(monkeypatch):
    """Torch's own linear layer: ZeRO-3 puts another one in its place for the life of a process, which does more."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


@pytest.fixture(scope="session")
def single_process():
    """DeepSpeed keeps its groups for the life of a process, so all engine tests of this process share one."""
    from ds_stochdpo.engine import process_group

    # Matrices this small gain nothing from threads, which wait for each other where cores are shared.
    torch.set_num_threads(1)
    with process_group() as ranks:
        yield ranks
