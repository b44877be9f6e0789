"""Attention that turns queries and keys itself, and its gradients, by Triton's interpreter."""

import pytest

from tests.support.interpreted import run

pytest.importorskip("triton")


def test_rotary_attention() -> None:
    run(script="tests.support.rotary_attention_interpreted")
