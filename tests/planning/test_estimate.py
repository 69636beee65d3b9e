"""Estimates against real steps of the same settings, and what a reader sees of them."""

import json
import re

import pytest
import torch

import ds_stochdpo
from ds_stochdpo import StochDPOConfig
from ds_stochdpo.data import load_pairs
from ds_stochdpo.engine import load_tokenizer
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.model.rehearsal import lanes_logps, measure_step
from ds_stochdpo.packing import draw, pack_lanes
from ds_stochdpo.planning.estimate import OWN, estimate, plans_for
from ds_stochdpo.planning.estimate_page import estimate_page
from ds_stochdpo.planning.forecast import forecast
from ds_stochdpo.planning.outlook import look_ahead
from ds_stochdpo.pruning import count_flops
from ds_stochdpo.pruning.traffic import Cluster
from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

pytestmark = pytest.mark.usefixtures("plain_linear")

CLUSTER = Cluster(tflops=0.001, gpus_per_node=4, link_gbps=8.0, node_gbps=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimate")
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    tiny_llama(len(tokenizer), **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", 4)
    return folder


def settings_of(folder, **settings):
    base = {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "pairs.jsonl"),
            "reference": "none", "per_device_train_batch_size": 4}  # fmt: skip
    return StochDPOConfig(**{**base, **settings})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"branch": "single", "prefix_keep": 0.75, "position_keep": 0.5}, {"branch": "single", "share_prompt": False}],
    ids=["exact", "all cuts", "branch, packed"],
)
def test_work_and_memory_of_a_real_step(folder, settings, checkpointing, single_process):
    """The step that the engine would make of these pairs, counted by torch and metered tensor by tensor."""
    config = settings_of(folder, gradient_checkpointing=checkpointing, **settings)
    outlook = look_ahead(config)
    (plan,) = estimate(outlook, plans_for(outlook, [OWN]), CLUSTER, nodes=[]).plans
    engine = ds_stochdpo.initialize(model=tiny_of(folder), config=config)
    pairs = load_pairs(config, load_tokenizer(config.model_name_or_path), progress=False).pairs
    layout = pack_lanes(pairs, draw(pairs, config), share_prompt=config.share_prompt)
    model = engine.deepspeed.module
    with count_flops() as counter:
        model(layout)[0].sum().backward()
    measured = measure_step(model, lambda begins: lanes_logps(model, layout, begins).sum())
    assert plan.memory.peak == pytest.approx(measured.peak, rel=0.1)
    assert plan.memory.kept == pytest.approx(measured.kept, rel=0.1)
    # Torch counts masked pairs of query and key too; an estimate leaves them out.
    counts = forecast(outlook.pairs, outlook.config, outlook.shape, world_size=1, attention="rectangle")
    assert 4 * counts.work.total == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert 0.9 * counts.work.total < plan.work.total < counts.work.total


def tiny_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def test_scales_by_hand(folder):
    outlook = look_ahead(settings_of(folder, deepspeed="ds_configs/zero3_cpu.json", dry_run_ranks=2))
    result = estimate(outlook, plans_for(outlook, ["exact", "stock"]), CLUSTER, nodes=[1, 2])
    exact, stock = result.plans
    assert result.ratio(exact, "stock") == stock.work.total / exact.work.total
    assert result.ratio(stock, "exact") < 1 < result.ratio(exact, "stock")
    assert result.ratio(stock, OWN) is None
    model = 4 * outlook.outline.num_weights
    assert (exact.traffic.all_gather, exact.traffic.reduce_scatter) == (2 * model, model)
    one, two = exact.scales
    assert (one.ranks, two.ranks) == (4, 8)
    assert one.compute_s == two.compute_s == pytest.approx(exact.work.total * 4 * exact.imbalance / 1e9)
    assert one.communication_s == pytest.approx(3 * model * 3 / 4 / 1e9)
    assert two.communication_s == pytest.approx(3 * model * 7 / 8 / 1e8)
    assert one.hidden_s == max(one.compute_s, one.communication_s)
    assert one.exposed_s == one.compute_s + one.communication_s
    # Shards halve, activations stay.
    assert one.peak.device > two.peak.device > exact.memory.peak


def test_lengths_stand_for_pairs(folder):
    outlook = look_ahead(settings_of(folder, dataset_name="", branch="single"), lengths=(30, 20, 10))
    (plan,) = estimate(outlook, plans_for(outlook, [OWN]), CLUSTER, nodes=[]).plans
    assert plan.work.tokens_executed == 30 + 19 + 9
    assert plan.work.tokens_backward == 30 + (19 + 9) / 2
    assert "30 + 20 + 10 tokens" in outlook.told


def test_the_record_is_strict_json(folder):
    outlook = look_ahead(settings_of(folder))
    result = estimate(outlook, plans_for(outlook), CLUSTER, nodes=[1])
    record = json.loads(json.dumps(result.record(), allow_nan=False))
    names = [plan["variant"]["name"] for plan in record["plans"]]
    assert names[0] == "stock"
    assert names[-1] == OWN
    assert {"model", "pairs", "state", "cluster", "settings", "pairs_per_rank", "attention_kernel"} < record.keys()
    plan = record["plans"][-1]
    assert plan["work"]["total"] == result.plans[-1].work.total
    assert plan["times_faster_than_exact"] == pytest.approx(1.0)
    assert plan["scales"][0]["hidden_s"] <= plan["scales"][0]["exposed_s"]
    page = estimate_page(result)
    for name in names:
        assert len(re.findall(rf"^  {re.escape(name)}   *[0-9]", page, re.MULTILINE)) == 6
    for unit in ("TFLOP (10^12 operations)", "GiB (2^30 bytes)", "GB (10^9 bytes)", "Gbit/s"):
        assert unit in page


def test_an_unknown_plan_is_refused(folder):
    with pytest.raises(ConfigError, match=r"plans names 'x'; known: stock, .*these settings"):
        plans_for(look_ahead(settings_of(folder)), ["x"])
