from dataclasses import fields

import pytest

from slipstream.training.config import load

TEXT = """
output_dir: runs/x
model: {mixers: [gla], hidden_size: 32}
data: {files: [a.txt], row_tokens: 64}
training: {learning_rate: 3e-3}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    return file


def test_config_reads_sections_and_overrides(path) -> None:
    config = load(path, ["data.row_tokens=128", "training.max_steps=7", "model.mixers=[kda, gla]"])
    assert config.data.row_tokens == 128
    assert config.data.files == ("a.txt",)
    assert config.tokenizer.vocab_size == 4096
    assert config.training == {"learning_rate": 0.003, "max_steps": 7}
    assert config.model == {"mixers": ["kda", "gla"], "hidden_size": 32}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.nonesuch=1", "data.nonesuch"),
        ("nonesuch=1", "nonesuch"),
        ("data.row_tokens", "want key=value"),
        ("data.packing=loose", "data.packing"),
        ("data.files=[]", "data.files"),
        ("data.held_out=2", "data.held_out"),
        ("data.row_tokens=1", "data.row_tokens"),
        ("data.lanes=0", "data.lanes"),
        ("data.eval_rows=0", "data.eval_rows"),
        ("tokenizer.train_bytes=0", "tokenizer.train_bytes"),
        ("tokenizer.vocab_size=3", "tokenizer.vocab_size"),
        ("output_dir.x=1", "output_dir"),
    ],
)
def test_config_rejects(path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.row_tokens=x", "'data.row_tokens' expected int, got str .*'x'"),
        ("data.row_tokens=true", "'data.row_tokens' expected int, got bool"),
        ("data.files=3", "'data.files' expected a tuple, got int"),
        ("tokenizer.path=3", "'tokenizer.path' with value 3 doesn't match any type"),
        ("data=3", "data: want a mapping"),
        ("model=[1]", "'model' expected a dict, got list"),
        ("output_dir=3", "'output_dir' expected str, got int"),
    ],
)
def test_config_names_values_of_a_wrong_type(path, override: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        load(path, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.row_token=1", "data.row_token: no such key; did you mean data.row_tokens"),
        ("trainin.max_steps=1", "trainin: no such key; did you mean training"),
        ("data.files=[", "cannot be read as YAML"),
    ],
)
def test_config_says_what_may_be_meant(path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path, [override])


def test_overrides_go_into_a_section_without_a_value(path) -> None:
    path.write_text(f"{TEXT}parallel:\ntokenizer:\n")
    config = load(path, ["parallel.shard=2", "tokenizer.vocab_size=300"])
    assert (config.parallel.shard, config.tokenizer.vocab_size) == (2, 300)


def test_dump_has_the_order_of_the_fields(path) -> None:
    config = load(path)
    config.dump(path)
    sections = [x.partition(":")[0] for x in path.read_text().splitlines() if x[0] != " "]
    assert sections == [x.name for x in fields(config)]
    assert load(path) == config
