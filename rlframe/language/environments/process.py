"""`process` and `evaluate`: an environment and a model, without trainer and trajectory service."""

from __future__ import annotations

import logging
import pathlib
from typing import TYPE_CHECKING, Any

from rlframe.errors import EnvError, UsageError
from rlframe.language.environments.collecting import FRUITLESS, WHY, Collector
from rlframe.language.environments.files import write_page
from rlframe.language.environments.metrics import open_wandb

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

_LOOK = 1.0  # seconds after which late items are looked for

logger = logging.getLogger(__name__)


async def process(env: BaseEnv) -> tuple[pathlib.Path, pathlib.Path]:
    """Collect `total_steps` groups and write them to `data_path_to_save_groups`, and as a page beside it.

    Returns:
        The JSONL file and the HTML file.

    Raises:
        EnvError: there were no more items, collecting failed too often, or `FRUITLESS` items in a row gave no group.
            What was collected is written.
    """
    config = env.config
    if env.groups_file is None:
        raise UsageError("process writes groups: give --env.data_path_to_save_groups FILE.jsonl.")
    if config.total_steps < 1:
        raise UsageError(
            f"process collects total_steps groups, 1 or more; got {config.total_steps}. Give --env.total_steps."
        )
    env.process_mode = True
    env.tracker = open_wandb(config, config.wandb_name or env.name or type(env).__name__, None, None)

    async def handle(item: Any) -> bool:
        kept = await env.handle_env(item)
        if kept:
            env.curr_step += 1
            await env.wandb_log({})
            logger.info("%d of %d groups", env.curr_step, config.total_steps)
        return kept

    collector = Collector(env.next_item, handle, env.statistics, config.worker_timeout)
    env.collector, env.workers = collector, collector.under_way
    try:
        await env.setup()
        env.curr_step = 0  # groups so far
        while (left := config.total_steps - env.curr_step) > 0:
            more = await collector.fill(min(env.max_num_workers, left))
            if not more and not collector.under_way:
                raise EnvError(f"There are no more items after {env.curr_step} of {config.total_steps} groups.")
            await collector.wait(_LOOK)
            if collector.fruitless >= FRUITLESS:
                so_far = f"after {env.curr_step} of {config.total_steps}"
                raise EnvError(f"{FRUITLESS} items in a row gave no group, {so_far}: {WHY}")
    finally:
        await collector.stop()
        await env.close()
        page = write_page(env.groups_file.path) if env.groups_file.path.exists() else None
    assert page is not None
    return env.groups_file.path, page


async def evaluate(env: BaseEnv) -> None:
    """One evaluation."""
    config = env.config
    env.tracker = open_wandb(config, config.wandb_name or env.name or type(env).__name__, None, None)
    try:
        await env.setup()
        await env.evaluate()
        await env.wandb_log({})
    finally:
        await env.close()
