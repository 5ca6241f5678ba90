"""`jaxllm bench ...` as a user runs it."""

import json
import subprocess
import sys

import pytest

from jaxllm import cli
from tests.serving.conftest import ROOT
from tests.serving.tiny_model import ENGINE_SETTINGS

SMALL = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5"]
SETTINGS = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in ENGINE_SETTINGS.items()
    if not isinstance(value, bool)
]


def bench(*words):
    return cli.main(["bench", *map(str, words), "-q"])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_measures_a_server(server, model_folder, tmp_path, capsys, backend):
    code = bench(
        *("serve", "--base-url", server.url, "--backend", backend, *SMALL, "--ignore-eos"),
        *("--tokenizer", model_folder),
        *("--max-concurrency", 2, "--num-warmups", 1, "--goodput", "ttft:1e5", "e2el:1e5"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--metadata", "a=b"),
    )
    assert code == 0
    shown = capsys.readouterr().out
    assert "requests answered" in shown and "TTFT" in shown
    (path,) = tmp_path.glob(f"{backend}-infqps-concurrency2-tiny-*.json")
    result = json.loads(path.read_text())
    assert result["completed"] == 6 and result["failed"] == 0
    assert result["model_id"] == "tiny" and result["backend"] == backend and result["a"] == "b"
    assert result["request_rate"] == "inf" and result["max_concurrency"] == 2
    assert result["total_output_tokens"] == 30 and result["output_lens"] == [5] * 6
    if backend == "openai":
        assert result["total_input_tokens"] == pytest.approx(120, abs=6)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert result["p50_ttft_ms"] == pytest.approx(result["median_ttft_ms"])
    for name in ("mean_tpot_ms", "std_itl_ms", "p99_e2el_ms", "ttfts", "itls", "queue_times"):
        assert name in result
    server.wait_idle()


def test_serve_agrees_with_the_servers_own_count(server, model_folder):
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [server.metric(name) for name in names]
    words = ["--tokenizer", model_folder, *SMALL, "--ignore-eos"]
    assert bench("serve", "--base-url", server.url, *words) == 0
    server.wait_idle()
    prompt, generated, requests = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    assert (generated, requests) == (30, 6)
    assert prompt == pytest.approx(120, abs=6)


def test_serve_without_a_tokenizer_and_with_a_rate(server, tmp_path):
    code = bench(
        *("serve", "--base-url", server.url, "--skip-tokenizer-init", "--random-input-len", 6),
        *("--random-output-len", 3, "--num-prompts", 5, "--request-rate", 40),
        *("--result-filename", tmp_path / "r.jsonl", "--append-result"),
    )
    assert code == 0
    result = json.loads((tmp_path / "r.jsonl").read_text())
    assert result["tokenizer_id"] is None and result["total_input_tokens"] > 5 * 6
    assert result["duration"] >= 5 / 40 and "ttfts" not in result


def test_serve_tells_failures(server, model_folder, capsys):
    words = ["--tokenizer", model_folder, "--extra-body", '{"top_p": 0}', *SMALL]
    assert bench("serve", "--base-url", server.url, *words) == 1
    captured = capsys.readouterr()
    assert "400" in captured.err and "top_p" in captured.err
    assert "requests failed" in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--model", "/no/such/folder"], "--tokenizer"),
        (["--goodput", "itl:5"], "itl:5"),
        (["--request-rate", "0"], "request rate"),
        (["--header", "nonsense"], "KEY=VALUE"),
        (["--dataset-name", "custom", "--model", "m", "--skip-tokenizer-init"], "--dataset-path"),
        (["--model", "m", "--skip-tokenizer-init", "--extra-body", "[1]"], "--extra-body"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--num-prompts", "0"], "num-prompts"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, words, message):
    assert bench("serve", "--port", 9, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxllm: error:") and message in error


@pytest.mark.slow
def test_sweep_writes_tables_and_plots(model_folder, tmp_path, capsys):
    code = bench(
        *("sweep", "--serve-cmd", f"{sys.executable} -m tests.serving.stub_serve serve"),
        *("--max-num-batched-tokens", 32, 64, "--max-concurrency", 1, 3, *SMALL, "--ignore-eos"),
        *("--output-dir", tmp_path, "--", model_folder, *SETTINGS, "--max-num-seqs=4"),
    )
    assert code == 0
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    places = [(row["max_num_batched_tokens"], row["max_concurrency"]) for row in rows]
    assert places == [(32, 1), (32, 3), (64, 1), (64, 3)]
    assert all(row["total_output_tokens"] == 30 and row["failed"] == 0 for row in rows)
    assert (tmp_path / "sweep.csv").read_text().count("\n") == 5
    assert (tmp_path / "sweep.md").read_text() == capsys.readouterr().out
    for name in ("ttft_itl.png", "throughput_latency.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_startup_measures_cold_and_warm(model_folder, tmp_path):
    code = bench(
        *("startup", "--serve-cmd", f"{sys.executable} -m tests.serving.stub_serve serve"),
        *("--num-iters-cold", 1, "--num-iters-warm", 1, "--output-json", tmp_path / "s.json"),
        *("--", model_folder, *SETTINGS),
    )
    assert code == 0
    result = json.loads((tmp_path / "s.json").read_text())
    for kind in ("cold", "warm"):
        total = result[f"avg_{kind}_startup_time"]
        assert total > result[f"avg_{kind}_ready_time"] > 0
        assert sum(result[f"{kind}_phases"].values()) == pytest.approx(total)


def test_a_server_that_does_not_start_is_told_with_its_words(capsys):
    words = ["startup", "--serve-cmd", f"{sys.executable} -c", "--", "raise SystemExit('no luck')"]
    assert bench(*words) == 2
    assert "no luck" in capsys.readouterr().err


@pytest.mark.slow
def test_throughput_and_latency_run_the_engine(model_folder, tmp_path, capsys):
    engine = [str(model_folder), *SETTINGS, "--max-num-seqs=2", "--enforce-eager"]
    code = bench(
        *("throughput", *SMALL[2:], "--num-prompts", 3, "--output-json", tmp_path / "t.json"),
        *engine,
    )
    assert code == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["num_requests"] == 3 and result["total_output_tokens"] == 15
    assert result["total_num_tokens"] == pytest.approx(75, abs=6)
    assert result["requests_per_second"] == pytest.approx(3 / result["elapsed_time"])
    assert "output tokens/s" in capsys.readouterr().out
    code = bench(
        *("latency", "--input-len", 4, "--output-len", 3, "--batch-size", 2, "--num-iters", 4),
        *("--num-iters-warmup", 1, "--output-json", tmp_path / "l.json", *engine),
    )
    assert code == 0
    result = json.loads((tmp_path / "l.json").read_text())
    assert len(result["latencies"]) == 4
    assert min(result["latencies"]) <= result["avg_latency"] <= max(result["latencies"])
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}


def test_the_command_line_imports_no_benchmark_before_one_is_chosen():
    code = (
        "import sys; from jaxllm import cli; cli._parser();"
        "sys.exit(bool({'aiohttp', 'matplotlib', 'serving.bench.datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", "startup", "sweep"])
def test_every_benchmark_has_help(capsys, name):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, "--help"])
    assert ended.value.code == 0
    assert "usage: jaxllm bench" in capsys.readouterr().out
