import json
import signal

import pytest
from rich.console import Console

from slipstream.training.checkpoints import last_checkpoint
from slipstream.training.config import from_dict
from slipstream.training.interrupt import Interrupt
from slipstream.training.run import arguments, train


def raw(out, **training) -> dict:
    return {
        "output_dir": str(out),
        "model": {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]},
        "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
        "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16},
        "training": training,
    }


def test_last_checkpoint_is_the_newest_whole_one(tmp_path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step, state in ((9, "{}"), (10, json.dumps({"global_step": 10})), (11, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-12").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_interrupt_notes_the_first_signal_and_lets_the_second_act(request) -> None:
    # a shell starts what it runs in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_train_asked_to_stop_while_it_prepares_does_not_begin(tmp_path) -> None:
    interrupt = Interrupt()
    interrupt.requested = signal.SIGTERM
    result = train(from_dict(raw(tmp_path)), interrupt, Console(quiet=True))
    assert result.step == 0
    assert result.held_out is None
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["nonesuch", "output_dir", "report_to"])
def test_arguments_rejects(tmp_path, name: str) -> None:
    with pytest.raises(ValueError, match=f"training.{name}"):
        arguments(from_dict(raw(tmp_path, **{name: "x"})))


def test_arguments_rejects_no_steps(tmp_path) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        arguments(from_dict(raw(tmp_path, max_steps=0)))
