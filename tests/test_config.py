"""Every setting that is refused, with the key and the value in the message; and the defaults of the contract."""

import dataclasses
import json
import math
import typing

import pytest

from ds_stochdpo.checks import TRACKERS
from ds_stochdpo.config import (
    BRANCH_BALANCES,
    BRANCHES,
    LOSS_TYPES,
    LR_SCHEDULERS,
    POSITION_SAMPLERS,
    PREFIX_SAMPLERS,
    PREFIX_WEIGHTINGS,
    PruningPlan,
    StochDPOConfig,
)
from ds_stochdpo.errors import ConfigError, StochDPOError

NAN, INF = math.nan, math.inf
KEEP_RATES = ("position_keep", "prefix_keep", "prefix_min_survival")
CHOICES = {
    "loss_type": LOSS_TYPES,
    "reference": ("cached", "online", "none"),
    "truncation_mode": ("keep_end", "keep_start"),
    "data_errors": ("stop", "skip"),
    "attn_implementation": ("auto", "flash_attn", "torch", "sdpa"),
    "coefficient": ("sampled",),
    "non_finite": ("stop", "skip"),
    "position_sampler": POSITION_SAMPLERS,
    "prefix_sampler": PREFIX_SAMPLERS,
    "prefix_weighting": PREFIX_WEIGHTINGS,
    "branch": BRANCHES,
    "branch_balance": BRANCH_BALANCES,
    "lr_scheduler_type": LR_SCHEDULERS,
}
COUNTS = (
    "max_length",
    "max_prompt_length",
    "max_samples",
    "dataset_num_proc",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_tokens_per_micro_batch",
    "eval_steps",
    "save_steps",
    "dry_run_ranks",
    "logging_steps",
    "score_chunk_rows",
    "mlp_tile_tokens",
)


def refused(match, **settings):
    with pytest.raises(ConfigError, match=match):
        StochDPOConfig(**settings)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, r"0\.0"),
        (-0.1, r"-0\.1"),
        (NAN, "nan"),
        (INF, "inf"),
        ("0,1", "'0,1'"),
        (None, "None"),
        (True, "True"),
    ],
)
def test_beta_is_a_positive_number(value, shown):
    refused(rf"^beta is {shown}; it must be a number in \(0, inf\)\.$", beta=value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-0.1, r"-0\.1"),
        (1.5, r"1\.5"),
        (NAN, "nan"),
        (INF, "inf"),
        ("50%", "'50%'"),
        (True, "True"),
        (None, "None"),
    ],
)
@pytest.mark.parametrize("key", KEEP_RATES)
def test_keep_rates_are_in_the_half_open_unit_interval(key, value, shown):
    refused(rf"^{key} is {shown}; it must be a number in \(0, 1\]\.$", **{key: value})


@pytest.mark.parametrize("key", KEEP_RATES)
@pytest.mark.parametrize("value", [1, 1.0, 0.5, 1e-9])
def test_keep_rates_that_are_allowed(key, value):
    assert getattr(StochDPOConfig(**{key: value}).pruning, key) == value


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, -0.1, 1.5, NAN, "0", "1", "nan", "inf"])
def test_branch_prob_is_in_the_open_unit_interval(value):
    shown = str(float(value)).replace(".", r"\.")
    match = rf"^branch_prob is {shown}; it must be a number in \(0, 1\), or 'sqrt_length'.*branch: both"
    refused(match, branch_prob=value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("half", "'half'"), ("50%", "'50%'"), (None, "None"), ([0.5], r"\[0\.5\]"), ("", "''")],
)
def test_branch_prob_that_is_no_number(value, shown):
    refused(rf"^branch_prob is {shown}; it must be a number in \(0, 1\) or 'sqrt_length'\.$", branch_prob=value)


@pytest.mark.parametrize(("value", "kept"), [("0.3", 0.3), (0.3, 0.3), ("sqrt_length", "sqrt_length")])
def test_branch_prob_is_read_from_text(value, kept):
    assert StochDPOConfig(branch_prob=value).branch_prob == kept
    assert StochDPOConfig(branch_prob=value).pruning.branch_prob == kept


@pytest.mark.parametrize("value", ["half", 0, 1.0, None])
def test_a_plan_of_its_own_checks_the_branch_probability_too(value):
    with pytest.raises(ConfigError, match=r"^branch_prob is .*\(0, 1\), or 'sqrt_length'"):
        PruningPlan(branch_prob=value)


@pytest.mark.parametrize(
    ("loss_type", "value", "match"),
    [
        ("sigmoid", -0.1, r"^label_smoothing is -0\.1; it must be a number in \[0, 0\.5\]"),
        ("sigmoid", 0.51, r"^label_smoothing is 0\.51; it must be a number in \[0, 0\.5\]"),
        ("sigmoid", NAN, r"^label_smoothing is nan"),
        ("sigmoid", "0.1", r"^label_smoothing is '0\.1'"),
        ("robust", 0.5, r"^label_smoothing is 0\.5; robust divides.*0\.5"),
        ("robust", 0.6, r"^label_smoothing is 0\.6"),
        ("robust", -0.1, r"^label_smoothing is -0\.1"),
        ("hinge", 0.1, r"^label_smoothing is 0\.1, but loss_type hinge has none; set it to 0"),
    ],
)
def test_label_smoothing_has_a_range_for_each_loss(loss_type, value, match):
    refused(match, loss_type=loss_type, label_smoothing=value)


@pytest.mark.parametrize(("loss_type", "value"), [("sigmoid", 0), ("sigmoid", 0.5), ("robust", 0.49), ("hinge", 0)])
def test_label_smoothing_that_is_allowed(loss_type, value):
    assert StochDPOConfig(loss_type=loss_type, label_smoothing=value).label_smoothing == value


def test_robust_needs_a_reference():
    refused(r"^reference is none, but loss_type robust.*reference: cached, or loss_type sigmoid or hinge",
            reference="none", loss_type="robust")  # fmt: skip
    for loss_type in ("sigmoid", "hinge"):
        assert StochDPOConfig(reference="none", loss_type=loss_type).reference == "none"


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_choice_is_refused_with_the_allowed_ones(key):
    for value in ("bogus", None, "", 1):
        refused(rf"^{key} is {value!r}; allowed: {', '.join(CHOICES[key])}\.$", **{key: value})
    for value in CHOICES[key]:
        assert getattr(StochDPOConfig(**{key: value}), key) == value


def test_every_field_with_choices_is_tested():
    hints = typing.get_type_hints(StochDPOConfig)
    literal = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal}
    assert literal == CHOICES


@pytest.mark.parametrize("value", ["bogus", "", "wandb,none", "wandb,,tensorboard", "all", None, 1])
def test_unknown_trackers_are_refused(value):
    refused(rf"^report_to is {value!r}; allowed: none, or any of {', '.join(TRACKERS)}, joined by commas\.$",
            report_to=value)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "names"),
    [("none", ()), ("wandb", ("wandb",)), ("tensorboard, wandb,tensorboard", ("tensorboard", "wandb"))],
)
def test_trackers_are_a_list_in_one_word(value, names):
    assert StochDPOConfig(report_to=value).trackers == names


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2.5, 4.0, "8", True, NAN])
def test_sizes_are_whole_numbers_of_at_least_one(key, value):
    refused(rf"^{key} is {value!r}; it must be a whole number of at least 1\.$", **{key: value})


def test_a_hang_is_seen_before_a_collective_gives_up():
    refused(r"^step_timeout_s is 1800, but ddp_timeout is 1800; make ddp_timeout longer", step_timeout_s=1800)
    refused(r"^step_timeout_s is -1; it must be a number in \[0, inf\)", step_timeout_s=-1)
    refused(r"^ddp_timeout is 0; it must be a whole number of at least 1", ddp_timeout=0)
    refused(r"^non_finite_limit is -1; it must be a whole number of at least 0", non_finite_limit=-1)
    assert StochDPOConfig(step_timeout_s=0, ddp_timeout=1).step_timeout_s == 0


def test_a_pair_needs_two_tokens():
    refused(r"^max_length is 1; a pair needs one prompt and one response token: set 2 or more\.$", max_length=1)
    assert StochDPOConfig(max_length=2).max_length == 2
    assert StochDPOConfig(max_prompt_length=1).max_prompt_length == 1


@pytest.mark.parametrize("value", ["", "5", "5 GB", "0GB", "-1GB", "5gb", "1.5GB", 5, None])
def test_a_shard_size_has_a_unit(value):
    refused(rf"^max_shard_size is {value!r}; write a whole number and KB, MB, GB or TB\.$", max_shard_size=value)
    assert StochDPOConfig(max_shard_size="20MB").max_shard_size == "20MB"


@pytest.mark.parametrize("value", [-1, 1.5, "0", None, True])
def test_seed_is_a_whole_number(value):
    refused(rf"^seed is {value!r}; it must be a whole number of at least 0\.$", seed=value)


@pytest.mark.parametrize("value", [0, -2, 1.5, "3", None])
def test_max_steps_is_positive_or_minus_one(value):
    refused(rf"^max_steps is {value!r}; it must be a whole number of at least 1, or -1 to train num_train_epochs\.$",
            max_steps=value)  # fmt: skip
    assert StochDPOConfig(max_steps=-1).max_steps == -1


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("learning_rate", -1e-6, r"\[0, inf\)"),
        ("learning_rate", NAN, r"\[0, inf\)"),
        ("learning_rate", "1e-6", r"\[0, inf\)"),
        ("weight_decay", -0.1, r"\[0, inf\)"),
        ("max_grad_norm", -1.0, r"\[0, inf\)"),
        ("max_grad_norm", INF, r"\[0, inf\)"),
        ("num_train_epochs", 0, r"\(0, inf\)"),
        ("num_train_epochs", -1.0, r"\(0, inf\)"),
        ("num_train_epochs", NAN, r"\(0, inf\)"),
        ("warmup_steps", -1, r"\[0, inf\)"),
        ("warmup_steps", NAN, r"\[0, inf\)"),
        ("warmup_ratio", -0.1, r"\[0, 1\)"),
        ("warmup_ratio", 1.0, r"\[0, 1\)"),
        ("warmup_ratio", "0.1", r"\[0, 1\)"),
    ],
)
def test_schedule_numbers_have_a_range(key, value, allowed):
    refused(rf"^{key} is {value!r}; it must be a number in {allowed}\.$", **{key: value})


def test_warmup_ratio_is_an_alias():
    assert StochDPOConfig(warmup_ratio=0.1).warmup_steps == 0.1
    assert StochDPOConfig(warmup_ratio=0.0).warmup_steps == 0.0
    assert StochDPOConfig(warmup_steps=0.1).warmup_steps == 0.1
    refused(r"^warmup_ratio and warmup_steps are both set; keep one of them\.$", warmup_ratio=0.1, warmup_steps=10)


def test_settings_survive_a_round_trip_through_json():
    config = StochDPOConfig(warmup_ratio=0.1, branch_prob="0.25", position_keep=0.5)
    again = json.loads(json.dumps(config.to_dict()))
    assert StochDPOConfig(**again) == config


def test_replacing_one_setting_checks_the_whole():
    with pytest.raises(ConfigError, match=r"^beta is 0"):
        dataclasses.replace(StochDPOConfig(), beta=0)


def test_config_errors_are_value_errors_of_the_package():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, StochDPOError)


DEFAULTS = {
    "beta": 0.1,
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "reference": "cached",
    "truncation_mode": "keep_end",
    "gradient_checkpointing": False,
    "activation_offload": False,
    "mlp_tile_tokens": None,
    "attn_implementation": "auto",
    "report_to": "none",
    "max_steps": -1,
    "position_keep": 1.0,
    "position_sampler": "systematic",
    "prefix_keep": 1.0,
    "prefix_sampler": "two_point",
    "prefix_min_survival": 0.25,
    "prefix_weighting": "ipw",
    "branch": "both",
    "branch_prob": 0.5,
    "branch_balance": "balanced",
    "coefficient": "sampled",
    "share_prompt": True,
    "share_response_start": True,
}


def test_defaults_are_those_of_the_contract():
    config = StochDPOConfig()
    assert {key: getattr(config, key) for key in DEFAULTS} == DEFAULTS
    assert type(config.branch_prob) is float
    # Left to the DeepSpeed JSON unless set.
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay",
                "max_grad_norm", "bf16"):  # fmt: skip
        assert getattr(config, key) is None


def test_a_plan_has_the_defaults_of_the_settings():
    assert PruningPlan() == StochDPOConfig().pruning
    assert StochDPOConfig().pruning.branch == "both"


def test_every_field_explains_itself():
    for item in dataclasses.fields(StochDPOConfig):
        assert item.metadata["help"].endswith((".", ")")), item.name


def test_plan_fields_are_settings():
    assert {f.name for f in dataclasses.fields(PruningPlan)} <= {f.name for f in dataclasses.fields(StochDPOConfig)}


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PruningPlan().position_keep = 0.5


def test_smoothing_that_leaves_no_preference_is_warned_of():
    with pytest.warns(UserWarning, match=r"label_smoothing is 0\.5"):
        StochDPOConfig(label_smoothing=0.5)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("a=prompt", "column_mapping is 'a=prompt'; it must map"),
        ({}, r"column_mapping is \{\}"),
        ({"a": 1}, "column_mapping is .*it must map"),
        ({1: "prompt"}, "column_mapping is .*it must map"),
        ({"a": "promt"}, "'a' 'promt', which is none of our columns: prompt, chosen, rejected"),
        ({"prompt": "question"}, "It is written as their column, then ours: question=prompt"),
        ({"a": "prompt", "b": "prompt"}, "column_mapping gives two columns the name 'prompt'"),
    ],
)
def test_a_column_mapping_gives_our_names_once_each(value, match):
    refused(match, column_mapping=value)
    assert StochDPOConfig(column_mapping={"a": "prompt", "b": "tools"}).column_mapping == {"a": "prompt", "b": "tools"}


SWITCHES = ("overwrite_output_dir", "dry_run", "gradient_checkpointing", "share_prompt", "share_response_start",
            "log_draws", "score_recompute", "streaming", "bf16", "activation_offload")  # fmt: skip


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["false", "no", 1, 0, ""])
def test_switches_are_true_or_false(key, value):
    refused(rf"^{key} is {value!r}; it must be true or false\.$", **{key: value})


def test_every_switch_is_tested():
    hints = typing.get_type_hints(StochDPOConfig)
    assert {name for name, hint in hints.items() if hint in (bool, bool | None)} == set(SWITCHES)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"reference": "none"}, r"^streaming is true, but max_steps is -1;.*set max_steps"),
        ({"max_steps": 5}, r"^streaming is true, but reference is cached,.*use reference: online or none"),
    ],
)
def test_a_stream_needs_a_number_of_steps_and_no_pass_ahead(settings, match):
    refused(match, streaming=True, **settings)
    assert StochDPOConfig(**settings).streaming is False
    for reference in ("online", "none"):
        assert StochDPOConfig(streaming=True, max_steps=5, reference=reference).streaming is True


def test_a_reference_model_needs_a_reference():
    refused(
        r"^ref_model_name_or_path is other, but reference is none", reference="none", ref_model_name_or_path="other"
    )


def test_offload_needs_recomputed_layers():
    refused(r"^activation_offload is true, but gradient_checkpointing is false", activation_offload=True)
    assert StochDPOConfig(activation_offload=True, gradient_checkpointing=True).activation_offload


def test_evaluation_needs_held_out_pairs():
    refused(r"^eval_steps is 5, but dataset_test_split names no pairs", eval_steps=5)
    refused(r"^dataset_test_split is train, which is dataset_train_split too", dataset_test_split="train")
    assert StochDPOConfig(eval_steps=5, dataset_test_split="test").eval_steps == 5


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("resume_from_checkpoint", True, "latest"),
        ("resume_from_checkpoint", "true", "latest"),
        ("resume_from_checkpoint", "latest", "latest"),
        ("resume_from_checkpoint", False, None),
        ("resume_from_checkpoint", "false", None),
        ("resume_from_checkpoint", "out/checkpoint-8", "out/checkpoint-8"),
        ("resume_override", "True", "true"),
        ("resume_override", "false", None),
        ("resume_override", "beta,seed", "beta,seed"),
    ],
)
def test_resuming_is_said_by_words_or_truth_values(key, value, kept):
    settings = {"resume_from_checkpoint": "latest", key: value}
    assert getattr(StochDPOConfig(**settings), key) == kept


def test_resuming_that_makes_no_sense():
    refused(r"^resume_from_checkpoint is 8; it must be a text, true or false", resume_from_checkpoint=8)
    refused(r"^resume_override is 'beta', but nothing is resumed", resume_override="beta")
    refused(r"^save_total_limit is 2, but save_steps is not set", save_total_limit=2)
    refused(r"^save_total_limit is 0; it must be a whole number of at least 1", save_total_limit=0, save_steps=5)
