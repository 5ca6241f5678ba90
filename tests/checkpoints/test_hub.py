from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxllm.checkpoints.errors import CheckpointError, HubError
from jaxllm.checkpoints.hub import HubId, parse_hub_id
from jaxllm.checkpoints.resolve import resolve
from tests.checkpoints.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Org-1/na.me_2", HubId("Org-1/na.me_2")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("org/name:sub/a-Q4_1.gguf", HubId("org/name", None, "sub/a-Q4_1.gguf")),
        ("org/name@v1:a.gguf", HubId("org/name", "v1", "a.gguf")),
        ("name", None),
        ("a/b/c", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("org/name:weights.bin", None),
        ("org/name:", None),
        ("https://huggingface.co/org/name", None),
    ],
)
def test_hub_ids(model, expected):
    assert parse_hub_id(model) == expected


def test_revision_beside_the_id():
    assert parse_hub_id("org/name", "v2") == HubId("org/name", "v2")
    assert parse_hub_id("org/name@v2", "v2") == HubId("org/name", "v2")
    with pytest.raises(CheckpointError, match="'v1', revision='v2'"):
        parse_hub_id("org/name@v1", "v2")


@pytest.fixture
def snapshot(monkeypatch):
    """Replaces the download; returns the list of its calls and a setter for what it gives."""
    calls, result = [], []

    def fake(repo, *args, **kwargs):
        calls.append((repo, *args, kwargs))
        if isinstance(result[0], Exception):
            raise result[0]
        return str(result[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake)
    return calls, lambda value: result.insert(0, value)


def test_snapshot_takes_weights_and_text_files_only(snapshot, tensors, write_folder):
    calls, give = snapshot
    give(write_folder(tensors))
    checkpoint = resolve("org/name@v1")
    assert (checkpoint.format, checkpoint.name) == ("safetensors", "org/name@v1")
    [(repo, options)] = calls
    assert repo == "org/name"
    assert options["revision"] == "v1"
    assert options["tqdm_class"] is None  # huggingface_hub's own bars
    names = [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "pytorch_model.bin",
        "modeling_x.py",
        "model.gguf",
        "consolidated.safetensors",
        "onnx/config.json",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(wanted) == names[:5]


def test_dummy_downloads_no_weights(snapshot, tensors, write_folder):
    calls, give = snapshot
    give(write_folder(tensors))
    assert resolve("org/name", load_format="dummy").format == "dummy"
    assert "*.safetensors" not in calls[0][1]["allow_patterns"]
    assert "*.json" in calls[0][1]["allow_patterns"]


def test_one_gguf_file(snapshot, tmp_path):
    calls, give = snapshot
    give(write_gguf(tmp_path / "a.gguf"))
    assert resolve("org/name:a.gguf", revision="v1", progress=False).format == "gguf"
    [(repo, file, options)] = calls
    assert (repo, file, options["revision"]) == ("org/name", "a.gguf", "v1")
    bar = options["tqdm_class"](total=1, name="x")
    assert bar.disable


def test_offline_says_what_was_tried_and_what_to_do(snapshot):
    calls, give = snapshot
    give(errors.LocalEntryNotFoundError("not in the cache\nmore"))
    with pytest.raises(HubError) as caught:
        resolve("org/name", offline=True)
    message = str(caught.value)
    assert calls[0][1]["local_files_only"] is True
    for part in ("org/name", "no download was tried", "not in the cache", "hf download", "HF_HOME"):
        assert part in message
    assert "more" not in message

    with pytest.raises(HubError, match="the Hub and the local Hub cache did not give it"):
        resolve("org/name")


def test_unreachable_hub_without_a_fake(monkeypatch, tmp_path):
    """The real client, its network replaced by a refusal and its cache by an empty folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for model in ("org/name", "org/name:a.gguf"):
        with pytest.raises(HubError, match=r"cannot get .*org/name.*hf download org/name"):
            resolve(model)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "no local path 'org/name'.*no such repository"),
        (errors.RevisionNotFoundError, "org/name but no revision 'v9'"),
        (errors.GatedRepoError, "is gated.*HF_TOKEN"),
        (errors.RemoteEntryNotFoundError, "no file 'a.gguf' of org/name at revision 'v9'"),
    ],
)
def test_refusals_of_the_hub(kind, message, snapshot):
    _, give = snapshot
    give(kind("refused", response=MagicMock()))
    with pytest.raises(HubError, match=message):
        resolve("org/name@v9:a.gguf")
