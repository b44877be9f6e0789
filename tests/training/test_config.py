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


def test_config_survives_its_dump(path, tmp_path) -> None:
    config = load(path)
    config.dump(tmp_path / "again.yaml")
    assert load(tmp_path / "again.yaml") == config


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
        ("output_dir.x=1", "output_dir"),
    ],
)
def test_config_rejects(path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path, [override])
