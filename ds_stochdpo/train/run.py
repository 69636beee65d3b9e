"""A whole training run: settings in, aligned model and its record out. Entry: `run_training`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, get_scheduler, set_seed

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import (
    PairSet,
    PairStream,
    PreferencePair,
    SetWindows,
    StreamWindows,
    Windows,
    load_pairs,
    open_stream,
)
from ds_stochdpo.engine import (
    Ranks,
    StochDPOEngine,
    add_reference,
    check_token_ids,
    frozen_settings,
    initialize,
    load_model_config,
    load_policy,
    load_tokenizer,
    process_group,
    reference_key,
    resolve_settings,
    weights_digest,
)
from ds_stochdpo.engine.checkpoint import load_checkpoint
from ds_stochdpo.errors import ConfigError, Interrupted, NonFiniteError
from ds_stochdpo.job import Guard, check_ranks_agree, commit, versions
from ds_stochdpo.train.checkpoints import Checkpoints
from ds_stochdpo.train.loop import Schedule, TrainLoop, plan_schedule
from ds_stochdpo.train.output_dir import claim_for, hold_output_dir, remove
from ds_stochdpo.train.progress import Progress, share_of
from ds_stochdpo.train.record import RunRecord
from ds_stochdpo.train.report import write_report
from ds_stochdpo.train.resume import Start, choose_start, run_identity
from ds_stochdpo.train.trackers import check_trackers, start_trackers

logger = logging.getLogger(__name__)


def run_training(config: StochDPOConfig, guard: Guard | None = None) -> None:
    """Train, evaluate, export and report. Every rank of the job calls this with the same settings.

    Data and settings are checked before the ranks meet, so a mistake ends all of them alike.

    Args:
        config: The settings.
        guard: Watches over signals and hangs; None: nobody does.

    Raises:
        StochDPOError: If settings, data or model are wrong, a loss is not finite, or the export does not verify.
        Interrupted: If a rank was sent a signal; the state is then in a checkpoint, where the run makes any.
    """
    if config.dry_run:
        raise ConfigError("dry_run is true, but run_training trains; call ds_stochdpo.planning.dry_run for the plan.")
    started = time.time()
    output_dir = Path(config.output_dir)
    check_trackers(config)
    claim_for(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    resolved, ds = resolve_settings(config, config.deepspeed, world_size=world_size)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train_set, test_set = _load_data(config, tokenizer)
    num_pairs = None if isinstance(train_set, PairStream) else len(train_set.pairs)
    schedule = plan_schedule(resolved, num_pairs=num_pairs, world_size=world_size)
    set_seed(config.seed)
    all_pairs = [pair for pairs in (train_set, test_set) if isinstance(pairs, PairSet) for pair in pairs.pairs]
    with process_group(timedelta(seconds=config.ddp_timeout)) as ranks, hold_output_dir(output_dir, ranks):
        check_ranks_agree(ranks)
        # Again, now that no other run can write there.
        claim = ranks.on_main(lambda: claim_for(config), may_take_long=False)
        digests = _digests(config, ranks)
        identity = run_identity(resolved, ds, train_set, digests, world_size=world_size)
        start = choose_start(resolved, ranks, ds, identity)
        engine = _build_engine(config, ds, schedule, all_pairs, tokenizer)
        if guard is not None:
            guard.watch_for_hangs(config.step_timeout_s)
            engine.watch, guard.can_finish = guard, True
        checkpoints = Checkpoints(output_dir, limit=config.save_total_limit, identity=identity)
        # Only now, when all settings have proved right, does anything of an earlier run go.
        with RunRecord(output_dir, writes=ranks.is_main, stale=claim.stale) as record:
            facts = _facts(engine, train_set, test_set, schedule)
            facts["resumed"] = [*record.earlier.get("resumed", []), *([start.record] if start else [])]
            record.run(facts)
            record.trackers = start_trackers(
                engine.config, writes=ranks.is_main, first_step=start.state["step"] + 1 if start else None
            )
            _announce(engine, schedule, train_set)
            try:
                windows, test_pairs = _pairs_to_train(
                    engine, train_set, test_set, tokenizer, digests, pairs_per_step=schedule.pairs_per_step
                )
                loop = TrainLoop(engine, schedule, record, windows, test_pairs, checkpoints)
                if start:
                    _restore(loop, start, checkpoints if claim.continues else None)
                    # Only now: until then they may be what is left to go on from.
                    ranks.on_main(lambda: remove(claim.newer), may_take_long=False)
                if config.save_steps:
                    checkpoints.warn_if_tight(engine, -(-schedule.total_steps // config.save_steps))
                loop.run()
            except (Interrupted, NonFiniteError) as error:
                record.run({**facts, "stopped": str(error), "exit_code": error.exit_code})
                raise
            if isinstance(train_set, PairStream):
                train_set.log_account()
            engine.export(output_dir, tokenizer)
            facts["data"] = _data_facts(train_set, test_set)
            facts["steps"] = {"total": engine.step, "skipped": int(engine.deepspeed.skipped_steps)}
            record.run({**facts, "finished": True, "wall_s": round(time.time() - started, 1)})
        if ranks.is_main:
            write_report(output_dir)
            _announce_end(loop, output_dir)


def _restore(loop: TrainLoop, start: Start, continued: Checkpoints | None) -> None:
    """Load the checkpoint; after the reference was scored, for which the policy had to be the initial one."""
    load_checkpoint(loop.engine, start.folder)
    loop.restore(start.progress)
    if loop.engine.ranks.is_main and loop.engine.step >= loop.schedule.total_steps:
        logger.info("all %d optimizer steps were done before; no step is left", loop.schedule.total_steps)
    if continued is not None:
        loop.record.cut(start.progress["lines"])
        continued.last_step = loop.engine.step


def _digests(config: StochDPOConfig, ranks: Ranks) -> dict[str, str | None]:
    """Digests of the model and of a separate reference; None where nothing would be compared with them."""
    names = {"model": config.model_name_or_path, "reference_model": config.ref_model_name_or_path}
    if config.reference != "cached" and not config.save_steps and not config.resume_from_checkpoint:
        return dict.fromkeys(names)
    # One rank reads the weight files; a 70B model would else be read once a rank.
    return ranks.on_main(lambda: {key: weights_digest(name) if name else None for key, name in names.items()})


def _pairs_to_train(
    engine: StochDPOEngine,
    train_set: PairSet | PairStream,
    test_set: PairSet | None,
    tokenizer: PreTrainedTokenizerBase,
    digests: dict[str, str | None],
    *,
    pairs_per_step: int,
) -> tuple[Windows, list[PreferencePair]]:
    """Windows of the training pairs, and the held-out pairs, with the reference's log-probs if those are cached."""
    weights = digests["reference_model"] or digests["model"] or ""
    windows: Windows
    if isinstance(train_set, PairStream):
        windows = StreamWindows(train_set, pairs_per_step=pairs_per_step)
    else:
        pairs = _with_reference(engine, train_set, tokenizer, weights, "training pairs")
        windows = SetWindows(pairs, seed=engine.config.seed, pairs_per_step=pairs_per_step)
    test_pairs = _with_reference(engine, test_set, tokenizer, weights, "held-out pairs") if test_set else []
    if engine.reference is not None and engine.config.reference == "cached":
        engine.reference.release()
        engine.reference = None
    return windows, test_pairs


def _load_data(
    config: StochDPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PairSet | PairStream, PairSet | None]:
    model_config, reference = load_model_config(config.model_name_or_path), _separate_reference(config)
    context = getattr(model_config, "max_position_embeddings", None)
    train_set: PairSet | PairStream
    if config.streaming:
        model_configs = [model_config, *([load_model_config(reference)] if reference else [])]
        vocab_size = min(c.get_text_config().vocab_size for c in model_configs)
        train_set = open_stream(config, tokenizer, context_length=context, vocab_size=vocab_size)
    else:
        train_set = load_pairs(config, tokenizer, context_length=context)
    has_test = config.dataset_test_split is not None
    return train_set, load_pairs(config, tokenizer, split="test", context_length=context) if has_test else None


def _build_engine(
    config: StochDPOConfig,
    ds: dict[str, Any],
    schedule: Schedule,
    pairs: Sequence[PreferencePair],
    tokenizer: PreTrainedTokenizerBase,
) -> StochDPOEngine:
    bf16 = bool(ds["bf16"]["enabled"])
    lm = load_policy(config.model_name_or_path, ds, bf16=bf16)
    ref_lm = (
        load_policy(ref_name, frozen_settings(ds), bf16=bf16) if (ref_name := _separate_reference(config)) else None
    )
    all_ids = (ids for p in pairs for ids in (p.prompt_ids, p.chosen_ids, p.rejected_ids))
    # A stream checks its pairs as they come.
    largest_id = max((int(ids.max()) for ids in all_ids), default=0)
    for model in (lm, ref_lm):
        if model is not None:
            check_token_ids(largest_id, model, len(tokenizer))
    scheduler = partial(
        get_scheduler,
        config.lr_scheduler_type,
        num_warmup_steps=schedule.warmup_steps,
        num_training_steps=schedule.total_steps,
    )
    return initialize(model=lm, config=config, ref_model=ref_lm, lr_scheduler=lambda optimizer: scheduler(optimizer))


def _separate_reference(config: StochDPOConfig) -> str | None:
    """Name of the model to load beside the policy, if the reference is not simply the policy before its first step."""
    name = config.ref_model_name_or_path or config.model_name_or_path
    if config.reference == "online" or (config.reference == "cached" and name != config.model_name_or_path):
        return name
    return None


def _with_reference(
    engine: StochDPOEngine, pair_set: PairSet, tokenizer: PreTrainedTokenizerBase, weights: str, what: str
) -> list[PreferencePair]:
    config, ranks = engine.config, engine.ranks
    if config.reference != "cached":
        return pair_set.pairs
    key = reference_key(
        weights=weights,
        tokenizer=_tokenizer_digest(tokenizer),
        pairs=pair_set.fingerprint,
        max_length=pair_set.max_length or 0,
        dtype=str(next(engine.module.parameters()).dtype),
    )
    folder = Path(config.reference_cache_dir) if config.reference_cache_dir else _default_cache()
    share = -(-len(pair_set.pairs) // ranks.world_size)
    title = f"reference log-probs, {what}{share_of(ranks)}"
    with Progress(title, share, "pair", is_shown=ranks.is_main) as bar:
        return add_reference(engine, pair_set.pairs, folder / f"{key}.safetensors", bar.advance)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ds_stochdpo" / "reference"


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    parts = {"vocab": tokenizer.get_vocab(), "template": tokenizer.chat_template, "special": tokenizer.all_special_ids}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _facts(
    engine: StochDPOEngine, train_set: PairSet | PairStream, test_set: PairSet | None, schedule: Schedule
) -> dict[str, Any]:
    return {
        "settings": engine.config.to_dict(),
        "deepspeed": engine.ds_config,
        "versions": versions(),
        "commit": commit(),
        "device": str(engine.ranks.device),
        "world_size": engine.ranks.world_size,
        "threads": torch.get_num_threads(),
        "attention": engine.attention,
        "schedule": vars(schedule),
        "data": _data_facts(train_set, test_set),
        "finished": False,
    }


def _data_facts(train_set: PairSet | PairStream, test_set: PairSet | None) -> dict[str, Any]:
    """The account of each split; of a stream, as far as it was read."""
    sets = {"train": train_set} | ({"test": test_set} if test_set else {})
    names = ("files", "fingerprint", "max_length", "counts", "first_lines")
    return {split: {name: getattr(pairs, name) for name in names} for split, pairs in sets.items()}


def _announce(engine: StochDPOEngine, schedule: Schedule, train_set: PairSet | PairStream) -> None:
    if not engine.ranks.is_main:
        return
    config = engine.config
    stage = engine.ds_config.get("zero_optimization", {}).get("stage", 0)
    precision = "bf16" if config.bf16 else "fp32"
    rest = 0 if isinstance(train_set, PairStream) else len(train_set.pairs) % schedule.pairs_per_step
    logger.info(
        "%s pairs, %d optimizer steps of %d pairs%s, %d rank(s), ZeRO stage %s, %s, attention %s, max_length %s",
        "streamed" if isinstance(train_set, PairStream) else len(train_set.pairs), schedule.total_steps,
        schedule.pairs_per_step, f" (the last of a pass has {rest})" if rest else "", engine.ranks.world_size, stage,
        precision, engine.attention, train_set.max_length,
    )  # fmt: skip
    plan = config.pruning
    logger.info(
        "position_keep %g (%s), prefix_keep %g (%s, %s), branch %s, share_prompt %s",
        plan.position_keep, plan.position_sampler, plan.prefix_keep, plan.prefix_sampler, plan.prefix_weighting,
        plan.branch, config.share_prompt,
    )  # fmt: skip


def _announce_end(loop: TrainLoop, output_dir: Path) -> None:
    if loop.evaluations:
        before, after = loop.evaluations[0], loop.evaluations[-1]
        logger.info("held-out pairs, nothing sampled      before      after")
        rows = {"accuracy": "rewards/accuracies", "reward margin": "rewards/margins", "loss": "loss"}
        for title, name in rows.items():
            logger.info("  %-30s %10.4f %10.4f", title, before[f"eval_{name}"], after[f"eval_{name}"])
        if loop.config.reference != "none" and _separate_reference(loop.config) in (
            None,
            loop.config.model_name_or_path,
        ):
            logger.info(
                "  before: policy and reference are the same: margins are 0 up to rounding, the accuracy says nothing"
            )
    logger.info("model, metrics.jsonl and report.html are in %s", output_dir)
