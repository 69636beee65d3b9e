"""Settings load in any Python: neither the package nor its settings import torch or anything that brings it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "numpy", "safetensors", "matplotlib", "tokenizers")


def loaded_by(code):
    """Which heavy packages are loaded after `code` has run in a fresh interpreter."""
    report = f"import sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import ds_stochdpo",
        "import ds_stochdpo.config, ds_stochdpo.errors",
        "from ds_stochdpo import StochDPOConfig, ConfigError; StochDPOConfig(position_keep=0.5).to_dict()",
        "import ds_stochdpo; dir(ds_stochdpo)",
    ],
)
def test_settings_load_without_torch(code):
    assert loaded_by(code) == "[]"


def test_the_rest_is_loaded_on_first_use():
    assert "'numpy'" in loaded_by("import ds_stochdpo; ds_stochdpo.draw")


def test_an_unknown_name_is_an_attribute_error():
    import ds_stochdpo

    with pytest.raises(AttributeError, match=r"'ds_stochdpo' has no attribute 'trainer'"):
        _ = ds_stochdpo.trainer
