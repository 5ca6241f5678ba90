import argparse
import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.planning.commands import add_plan_command, add_simulate_command
from jaxllm.planning.step_time import LinearStepTime, StepSample, write_samples


def run(*argv):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    add_plan_command(commands)
    add_simulate_command(commands)
    arguments = parser.parse_args([str(a) for a in argv])
    return arguments.run(arguments)


@pytest.fixture
def samples(tmp_path):
    truth = LinearStepTime(4e-3, 1e-5, 1e-4, 1e-8)
    path = tmp_path / "steps.json"
    write_samples(
        path,
        [
            StepSample(p, d, c, truth.seconds(p, d, c))
            for p in (0, 100, 300)
            for d in (1, 8, 32)
            for c in (100 * d, 900 * d)
        ],
    )
    return path


def test_plan_prints_a_table(capsys):
    assert run("plan", "llama-3.1-8b", "--gpu", "h100", "--no-compile") == 0
    text = capsys.readouterr().out
    assert "131,072 bytes" in text and "--max-num-batched-tokens" in text


def test_plan_prints_json_and_says_what_does_not_fit(capsys):
    code = run("plan", "llama-3.1-70b", "--memory", "80GiB", "--max-model-len", "8k", "--json")
    content = json.loads(capsys.readouterr().out)
    assert code == 1 and content["fits"] is False and content["smallest_tp"] == 2


def test_simulate_compares_settings_and_writes_plots(capsys, samples, tmp_path):
    pytest.importorskip("matplotlib")
    code = run(
        "simulate", "smollm2-135m", "--gpu", "cpu", "--kv-cache-memory", "64MiB",
        "--samples", samples, "--num-requests", 60, "--rate", 4, "--prompt-tokens", "16:64",
        "--output-tokens", 20, "--max-num-seqs", "4,16", "--replicas", "1,2",
        "--router", "least-loaded", "--plots", tmp_path / "plots",
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and len(lines) == 6
    assert lines[1].startswith("max_num_seqs=4, replicas=1") and " 60 " in lines[1]
    for name in ("latency", "load", "knobs"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5000


def test_simulate_reads_a_trace_and_uses_the_roofline(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"arrival": i / 10, "prompt_tokens": 50, "output_tokens": 10}) + "\n"
            for i in range(20)
        )
    )
    assert run("simulate", "llama-3.1-8b", "--gpu", "H100", "--trace", trace, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_finished"] == 20 and row["setting"] == "as planned"
    # Reading 14 GiB of weights at three quarters of 3.35 TB/s, and half a millisecond.
    assert 0.006 < row["itl"]["p50"] < 0.008


def test_simulate_needs_a_clock():
    with pytest.raises(ConfigError, match="--samples"):
        run("simulate", "llama-3.1-8b", "--memory", "80GiB")
    with pytest.raises(ConfigError, match="--attained-compute"):
        run("simulate", "llama-3.1-8b", "--gpu", "H100", "--attained-compute", "2")


def test_wrong_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        run("simulate", "llama-3.1-8b", "--gpu", "H100", "--router", "magic")
    assert "round-robin" in capsys.readouterr().err


def test_every_flag_has_a_help_text():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_plan_command(commands)
    add_simulate_command(commands)
    for command in commands.choices.values():
        assert all(action.help for action in command._actions), command.prog
