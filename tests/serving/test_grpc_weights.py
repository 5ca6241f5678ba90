"""Sleep and new weights over gRPC: uploads by themselves, and a server with the real engine."""

import shutil
import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.safetensors import SafetensorsFolder
from jaxllm.client import Client, RequestError
from serving.errors import ControlError
from serving.grpc import messages as pb
from serving.grpc.requests import weights_messages
from serving.grpc.weight_upload import WeightUpload
from serving.weights import WeightAccess
from tests.serving.conftest import running_server
from tests.serving.test_grpc import free_port
from tests.serving.tiny_model import make_tiny_model

SHAPES = [("a.weight", (3, 5)), ("b", (7,))]
ARRAYS = {
    "b": np.arange(7, dtype=np.float16),
    "a.weight": np.arange(15).reshape(3, 5).astype(ml_dtypes.bfloat16),
}


def chunks(arrays):
    messages = list(weights_messages(arrays, None, "", "refuse"))
    assert messages[0].WhichOneof("part") == "header"
    return [message.chunk for message in messages[1:]]


def test_an_upload_is_a_safetensors_file(tmp_path):
    upload = WeightUpload(tmp_path, SHAPES)
    for chunk in chunks(ARRAYS):
        upload.add(chunk)
    upload.finish()
    folder = SafetensorsFolder(tmp_path)
    for name, array in ARRAYS.items():
        whole = tuple((0, size) for size in array.shape)
        np.testing.assert_array_equal(folder.read(name, whole, array.dtype), array)


def test_large_arrays_travel_in_chunks(tmp_path):
    array = np.random.default_rng(0).standard_normal((600, 1000), np.float32)
    upload = WeightUpload(tmp_path, [("x", array.shape)])
    pieces = chunks({"x": array})
    assert len(pieces) == 3 and [bool(piece.name) for piece in pieces] == [True, False, False]
    for piece in pieces:
        upload.add(piece)
    upload.finish()
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["x"], array)


def chunk(name="", dtype="", shape=(), data=b""):
    return pb.TensorChunk(name=name, dtype=dtype, shape=shape, data=data)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([chunk(data=b"x")], "the first chunk: 1 bytes, but 0"),
        ([chunk("c", "float32", (7,))], "c is no weight of this model"),
        ([chunk("b", "float32", (8,))], r"b: \[8\], expected \[7\]"),
        ([chunk("b", "int8", (7,))], "b: dtype 'int8', one of float32, bfloat16, float16"),
        ([chunk("b", "float16", (7,), b"0" * 15)], "b: 15 bytes, but 14 are left"),
        ([chunk("b", "float16", (7,), b"0" * 14), chunk("b", "float16", (7,))], "b came before"),
        ([chunk("b", "float16", (7,), b"0")], "b: 13 bytes are missing"),
        ([chunk("b", "float16", (7,), b"0" * 14)], "weights are missing: a.weight"),
    ],
    ids=["no name", "name", "shape", "dtype", "too many bytes", "twice", "too few", "missing"],
)
def test_what_does_not_fit_ends_the_upload(tmp_path, sent, message):
    upload = WeightUpload(tmp_path, SHAPES)
    with pytest.raises(ControlError, match=message) as caught:
        for each in sent:
            upload.add(each)
        upload.finish()
    assert caught.value.fault == "argument"


def test_paths_stay_in_the_folder(tmp_path):
    root = tmp_path / "weights"
    (root / "step").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    access = WeightAccess(True, root)
    assert access.find("step") == root / "step"
    assert access.find(str(root / "step")) == root / "step"
    for path, fault in [
        ("../secret", "denied"),
        ("/etc", "denied"),
        ("link", "denied"),
        ("absent", "missing"),
        ("a\0b", "argument"),
    ]:
        with pytest.raises(ControlError) as caught:
            access.find(path)
        assert caught.value.fault == fault, path
    with pytest.raises(ControlError, match="--weights-dir"):
        WeightAccess(True).find("step")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two sets of weights: the model itself, and `step`."""
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm.checkpoints.resolve import resolve
    from jaxllm.models.registry import find_family

    folder = make_tiny_model(tmp_path_factory.mktemp("trained") / "model")
    family = find_family(resolve(folder, load_format="dummy").config)
    config = family.read_config(resolve(folder, load_format="dummy").config)
    sets = []
    for seed in (1, 2):
        module = family.module(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
        flat = nnx.to_flat_state(nnx.state(module))
        sets.append({".".join(map(str, p)): np.asarray(v.get_value()) for p, v in flat})
    save_file(sets[0], folder / "model.safetensors")
    step = folder.parent / "step"
    shutil.copytree(folder, step)
    save_file(sets[1], step / "model.safetensors")
    return folder, sets


@pytest.fixture(scope="module")
def served(trained):
    folder, _ = trained
    port = free_port()
    flags = [
        f"--grpc-port={port}",
        "--enable-weight-control",
        f"--weights-dir={folder.parent}",
        "--load-format=auto",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=32",
        "--enforce-eager",
        "--attention-backend=xla",
    ]
    with running_server(folder, *flags, module="serving.commands", ready_seconds=300) as running:
        yield running, f"127.0.0.1:{port}"


def greedy(client, prompt="Hello"):
    reply = client.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    return list(reply.samples[0].token_ids)


@pytest.mark.slow
def test_a_server_takes_new_weights_and_sleeps(trained, served):
    _, (old, new) = trained
    server, address = served
    with Client(address, timeout=120, retries=0) as client:

        def refused(call, code, match=None):
            with pytest.raises(RequestError, match=match) as caught:
                call()
            assert caught.value.code is code

        code = grpc.StatusCode
        first = greedy(client)
        assert client.server_info().weights_version == ""

        done = client.update_weights(new, version="2")
        assert (done.version, done.num_tensors) == ("2", len(new))
        assert done.num_bytes == sum(array.nbytes for array in new.values())
        second = greedy(client)
        assert second != first
        assert client.server_info().weights_version == "2"

        client.update_weights(path="model", version="1")
        assert greedy(client) == first
        client.update_weights(path="step", version="3")
        assert greedy(client) == second

        name = "model.norm.weight"
        refused(
            lambda: client.update_weights({**new, name: np.zeros((2, 2), np.float32)}),
            code.INVALID_ARGUMENT,
            rf"{name}: \[2, 2\], expected \[32\]",
        )
        refused(lambda: client.update_weights({name: new[name]}), code.INVALID_ARGUMENT, "missing")
        refused(lambda: client.update_weights(path="../x"), code.PERMISSION_DENIED)
        refused(lambda: client.update_weights(path="x"), code.NOT_FOUND)
        refused(lambda: client.sleep(3), code.INVALID_ARGUMENT, "level=3")
        refused(lambda: client.wake_up(["pool"]), code.INVALID_ARGUMENT, "tags='pool'")
        assert greedy(client) == second

        client.sleep()
        assert client.server_info().sleeping
        refused(lambda: greedy(client), code.UNAVAILABLE, "sleeps")
        assert server.get("/health").status_code == 503
        client.wake_up()
        assert greedy(client) == second
        client.sleep(2)
        client.wake_up(["weights"])
        client.update_weights(old, version="4")
        refused(lambda: greedy(client), code.UNAVAILABLE, "sleeps")
        client.wake_up(["kv_cache"])
        assert greedy(client) == first
        assert server.metric("num_requests_running") == 0


@pytest.mark.slow
def test_running_requests_are_refused_aborted_or_go_on(trained, served):
    _, (old, new) = trained
    _, address = served
    with Client(address, timeout=120, retries=0) as client:
        client.update_weights(old)
        long = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
        whole = list(client.generate("Hello", **long).samples[0].token_ids)
        seen, reasons = [], []
        begun = threading.Event()

        def run():
            seen.clear()
            for each in client.stream("Hello", **long):
                seen.extend(each.sample.token_ids)
                begun.set()
                if each.sample.HasField("finish"):
                    reasons.append(each.sample.finish.reason)

        def while_it_runs(work):
            begun.clear()
            thread = threading.Thread(target=run)
            thread.start()
            assert begun.wait(60)
            work()
            thread.join(120)
            assert not thread.is_alive()

        def refused():
            with pytest.raises(RequestError, match="1 unfinished") as caught:
                client.update_weights(new)
            assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION

        while_it_runs(refused)
        assert seen == whole and reasons.pop() == "length"

        def nap():
            client.sleep(running="recompute")
            client.wake_up()

        while_it_runs(nap)
        assert seen == whole and reasons.pop() == "length"

        while_it_runs(lambda: client.update_weights(new, running="recompute"))
        assert len(seen) == 400 and seen != whole and seen[0] == whole[0]
        assert reasons.pop() == "length"

        while_it_runs(lambda: client.sleep(running="abort"))
        assert len(seen) < 400 and reasons.pop() == "abort"
        client.wake_up()
