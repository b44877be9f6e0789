"""slipstream convert, as it is called."""

from pathlib import Path

from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

KDA = {"type": "kda", "gate_bias": True, "norm_eps": 1e-6}


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    return result.exit_code, result.output


def test_convert_there_and_back_and_errors(tmp_path: Path) -> None:
    ours, theirs, again = (tmp_path / x for x in ("ours", "theirs", "again"))
    config = SlipstreamConfig(vocab_size=17, hidden_size=16, num_heads=2, mixers=[KDA])
    SlipstreamForCausalLM(config).save_pretrained(ours)
    status, output = run(ours, theirs, "--to", "kda")
    assert status == 0 and output.startswith("slipstream to kda: ")
    status, output = run(theirs, again)
    assert status == 0 and output.startswith("kda to slipstream: ")
    status, output = run(ours, tmp_path / "more")
    assert status == 2 and "error: to: want one of gla, retnet" in output
    status, output = run(theirs, tmp_path / "more", "--ignore", "nothing")
    assert status == 2 and "error: ignore: nothing is not in" in output
