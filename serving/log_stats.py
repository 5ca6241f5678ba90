"""A line in the log every few seconds, while something happens."""

import asyncio
import collections
import logging
import time

from serving.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


async def log_stats(llm: AsyncLLM, interval: float) -> None:
    """Logs rates and state until it is cancelled; silent while nothing changes."""
    metrics = llm.metrics
    # The hit rate is over the last minutes: one entry per line.
    window: collections.deque[tuple[int, int]] = collections.deque(maxlen=30)
    began = time.monotonic()
    prompt, generated = metrics.totals.prompt_tokens, metrics.totals.generation_tokens
    quiet = False
    while True:
        await asyncio.sleep(interval)
        now = time.monotonic()
        new_prompt, new_generated = metrics.totals.prompt_tokens, metrics.totals.generation_tokens
        stats = metrics.last_stats
        window.append((stats.prefix_queries, stats.prefix_hits))
        idle = new_prompt == prompt and new_generated == generated and not stats.num_running
        if not (idle and quiet):
            queries = window[-1][0] - window[0][0] if len(window) > 1 else stats.prefix_queries
            hits = window[-1][1] - window[0][1] if len(window) > 1 else stats.prefix_hits
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV cache %.1f %%, prefix hits %.1f %%",
                (new_prompt - prompt) / (now - began),
                (new_generated - generated) / (now - began),
                stats.num_running,
                stats.num_waiting,
                100 * stats.kv_usage,
                100 * hits / queries if queries > 0 else 0.0,
            )
        quiet = idle
        began, prompt, generated = now, new_prompt, new_generated
