"""Models named by their Hugging Face Hub id, through huggingface_hub and its cache."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from tqdm.asyncio import tqdm_asyncio

from jaxllm.checkpoints.errors import CheckpointError, HubError

_METADATA = ("*.json", "tokenizer*", "*.model", "*.jinja", "*.txt")
_WEIGHTS = ("*.safetensors",)
# Other layouts of the same weights, kept beside the Hugging Face one by some repositories.
_IGNORED = ("consolidated*", "*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model")

_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(@(?P<revision>[\w.][\w./-]*))?(:(?P<file>[\w.][\w./ -]*\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name[@revision][:file.gguf]`."""

    repo: str
    revision: str | None = None
    file: str | None = None


def parse_hub_id(model: str, revision: str | None = None) -> HubId | None:
    """`model` as a Hub id, or None where it cannot be one.

    Raises:
        CheckpointError: `revision` contradicts the one within `model`.
    """
    match = _HUB_ID.fullmatch(model)
    if match is None:
        return None
    inner = match["revision"]
    if revision and inner and revision != inner:
        raise CheckpointError(f"{model!r} names the revision {inner!r}, revision={revision!r}")
    return HubId(match["repo"], inner or revision, match["file"])


def download(hub_id: HubId, *, weights: bool, offline: bool | None, progress: bool) -> Path:
    """The local snapshot folder, or the local GGUF file where `hub_id.file` names one.

    Args:
        hub_id: what to fetch; only safetensors, JSON, tokenizer files and chat templates are.
        weights: False fetches only configuration and tokenizer.
        offline: True uses only what an earlier download left; None follows HF_HUB_OFFLINE.
        progress: show huggingface_hub's progress bars.

    Raises:
        HubError: the Hub or its cache does not give the files; says what was tried and what to do.
    """
    local_only = bool(offline)
    bars = None if progress else _SilentBar

    def fetch_file() -> str:
        return huggingface_hub.hf_hub_download(
            hub_id.repo,
            hub_id.file or "",
            revision=hub_id.revision,
            local_files_only=local_only,
            tqdm_class=bars,
        )

    def fetch_folder() -> str:
        return huggingface_hub.snapshot_download(
            hub_id.repo,
            revision=hub_id.revision,
            allow_patterns=[*_METADATA, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_IGNORED),
            local_files_only=local_only,
            tqdm_class=bars,
        )

    return Path(_explained(fetch_file if hub_id.file else fetch_folder, hub_id, local_only))


class _SilentBar(tqdm_asyncio):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        super().__init__(*args, **(kwargs | {"disable": True}))


def _explained(fetch: Callable[[], str], hub_id: HubId, local_only: bool) -> str:
    at = f"{hub_id.repo}" + (f" at revision {hub_id.revision!r}" if hub_id.revision else "")
    what = f"{hub_id.file!r} of {at}" if hub_id.file else at
    try:
        return fetch()
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what} is gated: accept its terms on the Hub, then log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"the Hub has {hub_id.repo} but no revision {hub_id.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"there is no local path {hub_id.repo!r}, and the Hub has no such repository; "
            "if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"the Hub has no file {what}") from error
    except Exception as error:  # the HTTP client's own errors differ between releases
        offline = local_only or isinstance(error, errors.OfflineModeIsEnabled)
        tried = (
            "the local Hub cache (offline, so no download was tried)"
            if offline
            else "the Hub and the local Hub cache"
        )
        raise HubError(
            f"cannot get {what}: no local path of that name, and {tried} did not give it "
            f"({type(error).__name__}: {_first_line(error)}). Download it where there is a "
            f"network (`hf download {hub_id.repo}`) and pass that folder, or set HF_HOME to a "
            "cache that holds it"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
