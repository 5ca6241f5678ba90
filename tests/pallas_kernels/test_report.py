"""The report's arithmetic and its table, with the compile left out (test_aot.py has it)."""

import pytest

from pallas_kernels.testing import report
from pallas_kernels.testing.aot import AotError, Kernel
from pallas_kernels.testing.variants import cost, tile_clocks


def test_decode_costs_its_keys():
    least = cost(128, "bfloat16", "decode")
    keys = 64 * 4096 * 8 * 128
    assert least.flops == 4 * 64 * 4096 * 32 * 128
    assert least.bytes == 2 * keys * 2 + 2 * 64 * 32 * 128 * 2
    assert least.seconds == pytest.approx(least.bytes / 4.8e12)
    assert cost(128, "float8_e4m3fn", "decode").bytes < 0.51 * least.bytes


def test_prompt_costs_its_pairs():
    least = cost(64, "bfloat16", "prompt")
    assert least.flops == pytest.approx(2 * 4096**2 * 32 * 64, rel=1e-3)
    assert least.seconds == pytest.approx(least.flops / 989e12)


def test_clocks_of_a_tile():
    clocks = tile_clocks(128, "bfloat16", "decode")
    assert clocks.memory == pytest.approx(2 * 64 * 128 * 2 / (4.8e12 / 132 / 1.755e9))
    assert clocks.tensor == pytest.approx(2 * 2 * 64 * 64 * 128 / (989e12 / 132 / 1.755e9))
    assert clocks.exponential == 64 * 64 / 16
    assert clocks.in_turn < clocks.memory
    prompt = tile_clocks(128, "bfloat16", "prompt")
    assert prompt.tensor == pytest.approx(2 * clocks.tensor)
    assert prompt.busiest_on_chip == prompt.shared


@pytest.mark.parametrize("spills", [0, 8])
def test_report_prints_every_kernel_and_fails_on_spills(monkeypatch, capsys, spills):
    kernel = Kernel("k", 168, spills, 0, 100_000, 384, "")
    monkeypatch.setattr(
        report, "compile_variant", lambda variant: {"decode": kernel, "prompt": kernel}
    )
    assert report.main(["--implementation", "mosaic", "--head-dim", "128"]) == (spills > 0)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| mosaic-d128-bfloat16 | prompt")]
    assert f"| 168 | {spills} | 100000 | 384 | 1 | 19% |" in rows[0]
    assert "of the matmul rate" in rows[1]
    assert not any("d64" in line for line in lines)


def test_report_without_a_compiler(monkeypatch, capsys):
    def missing(variant):
        raise AotError("install the extra kernels-aot")

    monkeypatch.setattr(report, "compile_variant", missing)
    assert report.main([]) == 2
    assert "kernels-aot" in capsys.readouterr().err
