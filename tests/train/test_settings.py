"""YAML and flags give the same settings; what is unknown or of the wrong type is refused with its name."""

import pytest

from ds_stochdpo import ConfigError, LaunchError, StochDPOConfig
from ds_stochdpo.train import parse_settings


def yaml_file(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = yaml_file(tmp_path, "learning_rate: 1e-5\nbeta: 0.3\nbranch: single\nbf16: true\nmax_length: 64\n")
    config = parse_settings([*file, "--beta", "0.2", "--local_rank=1"])
    want = StochDPOConfig(learning_rate=1e-5, beta=0.2, branch="single", bf16=True, max_length=64)
    assert config == want


def test_values_in_the_file_are_read_as_on_the_command_line(tmp_path):
    # YAML 1.1 reads 1e-6 as text; both ways must give the number.
    from_file = parse_settings(
        yaml_file(tmp_path, "learning_rate: 1e-6\nbranch_prob: 0.25\nmax_steps: 3\nshare_prompt: no\n")
    )
    from_flags = parse_settings(
        ["--learning_rate", "1e-6", "--branch_prob", "0.25", "--max_steps", "3", "--share_prompt", "no"]
    )
    assert from_file == from_flags
    assert from_file.learning_rate == 1e-6
    assert from_file.pruning.branch_prob == 0.25
    assert from_file.share_prompt is False


def test_text_in_the_file_stays_the_text_that_was_written(tmp_path):
    config = parse_settings(yaml_file(tmp_path, "output_dir: 010\nseed: 010\nmax_length: null\nbf16: ~\n"))
    assert (config.output_dir, config.seed, config.max_length, config.bf16) == ("010", 10, None, None)


def test_switches_have_a_bare_form():
    assert parse_settings(["--bf16", "--log_draws"]) == StochDPOConfig(bf16=True, log_draws=True)


def test_a_column_mapping_is_written_as_text_json_or_yaml(tmp_path):
    want = {"question": "prompt", "a=b": "chosen"}
    yaml = yaml_file(tmp_path, "column_mapping:\n  question: prompt\n  a=b: chosen\n")
    for arguments in (
        ["--column_mapping", "question = prompt, a=b = chosen"],
        ["--column_mapping", '{"question": "prompt", "a=b": "chosen"}'],
        yaml,
    ):
        assert parse_settings(arguments).column_mapping == want


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--lerning_rate", "1"], "lerning_rate is no setting; did you mean learning_rate"),
        (["--beta", "0,1"], "beta"),
        (["--branch", "one"], "branch"),
        (["--max_steps", "1.5"], "max_steps"),
        (["--position_keep", "50%"], "position_keep"),
        (["--config", "missing.yaml"], "missing.yaml.*cannot be read"),
        (["--learning", "1"], "learning is no setting"),
        (["--column_mapping", "question"], "'question' is no mapping; write"),
        (["--column_mapping", "a=prompt,a=chosen"], "is no mapping; write each column once"),
        (["--column_mapping", '{"a":'], "is no JSON object"),
        (["--column_mapping", "prompt=question"], "none of our columns"),
    ],
)
def test_mistakes_on_the_command_line(arguments, match):
    with pytest.raises(ConfigError, match=match):
        parse_settings(arguments)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("prefix_kep: 0.5\n", "prefix_kep is no setting; did you mean prefix_keep"),
        ("beta: [1]\n", "beta holds a list"),
        ("column_mapping: [prompt]\n", "column_mapping holds a list"),
        ("column_mapping:\n  a:\n    b: prompt\n", "column_mapping is .*it must map"),
        ("- beta\n", "holds a list"),
        ("beta: {\n", "not YAML"),
        ("beta: high\n", "beta"),
        ("branch: one\n", "branch is 'one'"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        parse_settings(yaml_file(tmp_path, text))


@pytest.mark.parametrize("option", ["--master_port", "--hostfile", "--include", "--num_gpus", "--nproc_per_node"])
def test_an_option_of_the_launcher_behind_the_script_is_reported(option):
    for arguments in ([option, "29501"], [f"{option}=29501"]):
        with pytest.raises(LaunchError, match=f"^{option} is an option of the launcher.*before launch/train.py"):
            parse_settings(["--beta", "0.2", *arguments])
