"""Our settings and the DeepSpeed JSON: one owner a number, "auto" filled, contradictions named."""

import json

import pytest

from ds_stochdpo import ConfigError, StochDPOConfig
from ds_stochdpo.engine.settings import fill_model_sizes, resolve_settings

ZERO3 = {"zero_optimization": {"stage": 3}}


def resolve(ds=None, world_size=2, **settings):
    return resolve_settings(StochDPOConfig(**settings), ds, world_size=world_size)


def test_defaults_where_neither_says():
    config, ds = resolve(ZERO3)
    assert config.per_device_train_batch_size == 8
    assert config.gradient_accumulation_steps == 1
    assert config.learning_rate == 1e-6
    assert config.max_grad_norm == 1.0
    assert config.bf16 is False
    assert ds["gradient_clipping"] == 1.0
    assert ds["managed_gradient_accumulation"] is False
    assert ds["gradient_accumulation_steps"] == 1
    assert ds["optimizer"]["params"]["torch_adam"] is True


def test_auto_takes_our_values():
    ds = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay", "betas", "eps"), "auto")},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto"},
    }  # fmt: skip
    given = json.dumps(ds)
    _, filled = resolve(
        ds, learning_rate=3e-5, weight_decay=0.1, max_grad_norm=0.0, per_device_train_batch_size=4, bf16=True
    )
    filled = fill_model_sizes(filled, hidden_size=100)
    assert "auto" not in json.dumps(filled)
    want = {"lr": 3e-5, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}
    assert filled["optimizer"]["params"] == want
    assert filled["gradient_clipping"] == 0.0
    assert filled["train_micro_batch_size_per_gpu"] == 4
    assert filled["bf16"]["enabled"] is True
    assert filled["zero_optimization"]["reduce_bucket_size"] == 10000
    assert json.dumps(ds) == given, "the caller's dict stays as it was"


def test_numbers_of_the_json_stand_where_ours_are_unset():
    ds = {**ZERO3, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "gradient_accumulation_steps": 5,
          "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "bf16": {"enabled": True}}  # fmt: skip
    config, filled = resolve(ds)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (3, 5)
    assert (config.learning_rate, config.max_grad_norm, config.bf16) == (1.0, 0.0, True)
    assert filled["optimizer"]["type"] == "SGD"
    assert "torch_adam" not in filled["optimizer"]["params"]


@pytest.mark.parametrize(
    ("ds", "settings", "words"),
    [
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, ["max_grad_norm", "gradient_clipping", "0.5"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, {"learning_rate": 1e-5}, ["learning_rate", "lr"]),
        ({"train_batch_size": 63, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, {},
         ["63", "per_device_train_batch_size 4 (train_micro_batch_size_per_gpu in the JSON)",
          "gradient_accumulation_steps 8 (gradient_accumulation_steps in the JSON)", "2 ranks", "= 64"]),
        ({"train_batch_size": 64, "gradient_accumulation_steps": "auto"}, {"per_device_train_batch_size": 4},
         ["64", "per_device_train_batch_size 4 (the setting)", "gradient_accumulation_steps 1 (the default)", "= 8"]),
        ({"scheduler": {"type": "WarmupLR"}}, {}, ["scheduler", "lr_scheduler_type"]),
        ({"fp16": {"enabled": True}}, {}, ["fp16.enabled", "bf16"]),
        ({"tensorboard": {"enabled": True}}, {}, ["tensorboard.enabled", "surrogate", "report_to"]),
        ({"zero_optimization": {"stage": 0}}, {"bf16": True}, ["stage 0", "drift"]),
        ({"bf16": {"enabled": True}}, {"bf16": False}, ["bf16", "bf16.enabled"]),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {"bf16": True},
         ["bf16_optimizer_states is true without bf16.bf16_master_weights_and_grads"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"bf16": True},
         ["bf16.bf16_master_weights_and_grads", "offload_optimizer", "bf16.bf16_optimizer_states"]),
    ],
)  # fmt: skip
def test_contradictions_name_both_sides(ds, settings, words):
    with pytest.raises(ConfigError) as error:
        resolve({**ZERO3, **ds}, **settings)
    for word in words:
        assert word in str(error.value)


def test_an_auto_nobody_decides_is_named():
    """Before any model is looked at."""
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_param\.device"):
        resolve({"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}})


def test_a_json_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(tmp_path / "no.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        resolve(str(broken))
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        resolve(str(broken))


def test_settings_can_be_resolved_again():
    config, _ = resolve(ZERO3, warmup_ratio=0.1)
    assert config.warmup_steps == 0.1
    assert resolve_settings(config, ZERO3, world_size=2)[0] == config


@pytest.mark.parametrize(
    ("ds", "match"),
    [
        ({"zero_optimizatoin": {"stage": 3}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": 3}, "zero_optimization .* must be an object"),
        ({"zero_optimization": {"stage": 5}}, "stage .* is 5"),
        ({"zero_optimization": {"stage": "auto"}}, "stage .* is 'auto'"),
        ({"bf16": True}, "bf16 .* must be an object"),
        ({"optimizer": None}, "optimizer .* must be an object"),
        ({"optimizer": {"type": "SGD", "params": None}}, "optimizer.params"),
        ({"train_batch_size": "64"}, r"^train_batch_size .* is '64'; it must be a whole number, or \"auto\""),
        ({"train_micro_batch_size_per_gpu": 2.0}, r"^train_micro_batch_size_per_gpu .* is 2\.0; .* a whole number"),
        ({"gradient_clipping": "1.0"}, r"^gradient_clipping .* is '1\.0'; it must be a number"),
        ({"gradient_clipping": True}, r"^gradient_clipping .* is True; it must be a number"),
        ({"optimizer": {"params": {"lr": "1e-5"}}}, r"^optimizer\.params\.lr .* is '1e-5'; it must be a number"),
        ({"bf16": {"enabled": "true"}}, r"^bf16\.enabled .* is 'true'; it must be true or false"),
        ({"bf16": {"enabled": 1}}, r"^bf16\.enabled .* is 1; it must be true or false"),
        ({"bfloat16": {"enabled": True}}, "section bfloat16, an old name; call it bf16"),
    ],
)
def test_a_json_deepspeed_would_trip_over_is_refused(ds, match):
    with pytest.raises(ConfigError, match=match):
        resolve(ds)


def test_no_optimizer_is_compiled_unless_asked_for():
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    assert resolve({**ZERO3, **adam})[1]["optimizer"]["params"]["torch_adam"] is True
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert "torch_adam" not in resolve({**offload, **adam})[1]["optimizer"]["params"]


def test_stage_1_gets_no_overlapped_reduction():
    assert (
        resolve({"zero_optimization": {"stage": 1, "overlap_comm": True}})[1]["zero_optimization"]["overlap_comm"]
        is False
    )
