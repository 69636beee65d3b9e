import json

import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def load(tmp_path, tokenizer):
    """Write rows to a JSON-lines file and load them."""

    def run(rows, tok=tokenizer, context_length=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return load_pairs(StochDPOConfig(dataset_name=str(path), **settings), tok, context_length=context_length)

    return run
