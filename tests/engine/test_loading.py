"""Model folders that are not what they seem: refused with file and size, never trained from new random weights."""

import json
import os

import pytest
from safetensors.torch import load_file, save_file

from ds_stochdpo import ConfigError, ModelError
from ds_stochdpo.engine import load_model_config, load_policy, load_tokenizer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("single_process")


def pointer(weights):
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345678\n")


def cut_off(weights):
    os.truncate(weights, weights.stat().st_size - 1024)


def without_head(weights):
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, weights, {"format": "pt"})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (pointer, r"model.safetensors \(\d\d\d bytes\) is no complete safetensors file .*pointer"),
        (cut_off, r"model.safetensors \(\d+ bytes\) is no complete safetensors file"),
        (without_head, r"lacks weights for this model \(missing_keys: lm_head.weight\)"),
    ],
)
def test_a_bad_model_folder_is_refused(tmp_path, spoil, words, stage):
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model" / "model.safetensors")
    ds = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": False}}
    with pytest.raises(ModelError, match=words):
        load_policy(str(tmp_path / "model"), ds, bf16=False)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    automatic = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "strange", "auto_map": automatic}))
    for load in (load_model_config, load_tokenizer):
        with pytest.raises(ConfigError, match="brings Python code of its own, which is never run here"):
            load(str(tmp_path))
    assert not (tmp_path / "ran").exists()
