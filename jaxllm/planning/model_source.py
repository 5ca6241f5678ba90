"""Which model a plan is for: a name in the table, a config, or anything the engine can load."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.planning.models_table import MODELS, find_model

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig


def read_model(
    model: str | Path | Mapping[str, Any], dtype: str, revision: str | None
) -> tuple[str, dict[str, Any], "ModelConfig", str]:
    """Name, config.json, its ModelConfig, and the dtype of the weights."""
    from jaxllm.checkpoints.errors import NotFoundError
    from jaxllm.checkpoints.resolve import Checkpoint, checkpoint_dtype, resolve
    from jaxllm.models.registry import find_family

    known = find_model(model) if isinstance(model, str) and not Path(model).exists() else None
    if isinstance(model, Mapping) or known is not None:
        content = dict(model) if isinstance(model, Mapping) else known or {}
        name = str(content.get("_name_or_path") or "config") if known is None else str(model)
        checkpoint = Checkpoint("dummy", Path(name), content, {}, name)
    else:
        path: str | Path = model
        try:
            checkpoint = resolve(path, revision=revision, load_format="dummy", progress=False)
        except NotFoundError as error:
            raise ConfigError(f"{error}; known by name: {', '.join(MODELS)}") from error
    config = find_family(checkpoint.config).read_config(checkpoint.config)
    chosen = checkpoint_dtype(checkpoint) if dtype == "auto" else dtype
    return checkpoint.name, checkpoint.config, config, chosen
