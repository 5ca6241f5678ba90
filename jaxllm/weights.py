"""WeightControl: what a trainer does to a running engine. New weights, sleep, wake up."""

import dataclasses
import logging
import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import Checkpoint, resolve
from jaxllm.engine.step_plan import EngineOutput
from jaxllm.errors import AsleepError, BusyError, ParameterError, WeightsError
from jaxllm.execution.huge_pages import arena_for, in_huge_pages
from jaxllm.execution.parameters import Params
from jaxllm.execution.quantization import prepare
from jaxllm.execution.weights import check_weights, named_leaves, place_weights, to_host
from jaxllm.models.registry import find_family
from jaxllm.startup import Engine

logger = logging.getLogger(__name__)

type Running = Literal["refuse", "abort", "recompute"]

RUNNING = get_args(Running.__value__)
TAGS = ("weights", "kv_cache")


class WeightControl:
    """The weights and the KV pool of an engine, and where they are.

    Unfinished requests are treated as `running` says, by every method that has it. The steps in
    flight are finished first, with the old weights, and their tokens count. Then

      - "refuse": BusyError if a request is unfinished; nothing has changed.
      - "abort": they end, with finish reason "abort".
      - "recompute": they give their KV blocks back, keep their tokens, and their K/V are computed
        anew when they run again: what follows is what the new weights give for those tokens.

    Methods return the news that came of it, for whoever steps the core.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._on_host: dict[str, np.ndarray] = {}

    @property
    def is_sleeping(self) -> bool:
        """True while the weights or the pool are not on the device."""
        return not (self._engine.runner.params and self._engine.runner.has_pools)

    def check_awake(self) -> None:
        """Raises AsleepError, with what to do, while the engine sleeps."""
        runner = self._engine.runner
        if self._on_host:
            raise AsleepError("the engine sleeps, its weights are in host memory: wake_up() first")
        if not runner.params:
            raise AsleepError(
                "the weights were discarded by sleep(level=2): update_weights() first"
                + ("" if runner.has_pools else ", then wake_up()")
            )
        if not runner.has_pools:
            raise AsleepError("the engine sleeps without its KV pool: wake_up() first")

    @property
    def params(self) -> Params:
        """The weights as the programs read them; AsleepError if they are not on the device."""
        if not self._engine.runner.params:
            self.check_awake()
        return dict(self._engine.runner.params)

    def update(
        self, weights: Any, *, copy: bool = True, running: Running = "refuse"
    ) -> list[EngineOutput]:
        """Puts new weights in the place of those the engine has, and drops the prefix cache.

        Args:
          weights: a Flax module or state, a mapping, or the place of a checkpoint.
          copy: see `execution.weights.place_weights`.

        Raises:
          WeightsError, CheckpointError: they do not fit. The old weights stay.
          BusyError: see `running`.
        """
        began = time.monotonic()
        model = self._engine.runner.model
        abstract = model.source
        leaves: dict[str, Any] = {}
        checkpoint: Checkpoint | None = None
        if isinstance(weights, (str, Path)):
            checkpoint = self._find(weights)
        else:
            leaves = check_weights(named_leaves(weights), abstract)
        news = self._settle("update_weights", running)
        arena = arena_for(model.abstract) if copy else None
        if checkpoint is not None:
            ignore = self._engine.runner.model.ignored_names
            params = load_params(checkpoint, abstract, ignore=ignore, progress=False)
        else:
            # Filling an arena copies them all.
            params = place_weights(leaves, abstract, copy and arena is None)
        params = prepare(params, model)
        self._engine.runner.set_params(params if arena is None else arena.fill(params))
        self._on_host = {}
        logger.info("new weights in %.3f s", time.monotonic() - began)
        return news

    def sleep(self, level: int = 1, *, running: Running = "refuse") -> list[EngineOutput]:
        """Gives the device's memory back: the KV pool is dropped, with all that was cached.

        Args:
          level: 1 keeps the weights in host memory, 2 discards them.

        Raises:
          ParameterError, BusyError.
        """
        if level not in (1, 2):
            raise ParameterError("level", level, "1 (weights to host memory) or 2 (discarded)")
        news = self._settle("sleep", running)
        runner = self._engine.runner
        if runner.has_pools:
            runner.free_pools()
        params = dict(runner.params)
        runner.set_params({})
        if level == 2:
            self._on_host = {}
        elif params:
            self._on_host = to_host(params)
        return news

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes memory again: "weights" from the host, a fresh "kv_cache"; None for both.

        After level 2 there are no weights to bring back: `update` brings new ones.

        Raises:
          ParameterError: a tag is unknown.
        """
        for tag in tags or ():
            if tag not in TAGS:
                raise ParameterError("tags", tag, f"of {', '.join(TAGS)}")
        wanted = TAGS if tags is None else tags
        runner = self._engine.runner
        if "weights" in wanted and self._on_host:
            params = place_weights(self._on_host, runner.model.abstract, copy=False)
            runner.set_params(in_huge_pages(params))
            self._on_host = {}
        if "kv_cache" in wanted and not runner.has_pools:
            runner.allocate_pools()

    def _settle(self, action: str, running: Running) -> list[EngineOutput]:
        """Ends the steps in flight, deals with unfinished requests, drops the prefix cache."""
        if running not in RUNNING:
            raise ParameterError("running", running, f"one of {', '.join(RUNNING)}")
        core = self._engine.core
        requests = core.scheduler.requests
        if running == "refuse" and requests:
            raise BusyError(action, len(requests))
        news = core.drain()
        if running == "abort":
            news += core.abort(list(requests))
        core.reset_prefix_cache(preempt_running=True)
        return news

    def _find(self, place: str | Path) -> Checkpoint:
        """The checkpoint at a place, if it is one of this model."""
        mine = self._engine.checkpoint
        folder = Path(place)
        # What a trainer saves is often the tensors alone.
        if not (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            return Checkpoint("safetensors", folder, mine.config, {}, str(place))
        found = resolve(place, progress=False)
        theirs = dataclasses.asdict(find_family(found.config).read_config(found.config))
        expected = dataclasses.asdict(self._engine.model_config)
        different = [
            f"{name}: {theirs[name]!r} in {place}, expected {value!r}"
            for name, value in expected.items()
            if not _is_close(theirs[name], value)
        ]
        if different:
            raise WeightsError(different)
        return found


def _is_close(one: Any, other: Any) -> bool:
    """Equality, but for the last digits of floats: some formats keep 32 bits of them."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_close, one, other))
    return bool(one == other)
