import gc

import pytest

from tests.cases.job import Jobs


@pytest.fixture(scope="session")
def jobs(single_process, tmp_path_factory):
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    # DeepSpeed collects garbage whenever an engine starts or ends; what is here by now is none.
    gc.freeze()
    return jobs
