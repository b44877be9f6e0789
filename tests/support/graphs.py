"""A stand-in for CUDA graphs on a CPU: runs the captured function again on the same tensors."""

from collections.abc import Callable

from torch import Tensor


class RepeatedCall:
    """As models/graphs.py:CudaGraph. `made` has every one of a test."""

    made: list["RepeatedCall"]

    def __init__(self) -> None:
        self.made.append(self)
        self.replays = 0

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        self.run, self.result = run, run()
        return self.result

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.run())


class NoCapture(RepeatedCall):
    """Of a model that something in it keeps from being captured."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")


def repeated_calls(monkeypatch, kind: type[RepeatedCall] = RepeatedCall) -> list[RepeatedCall]:
    """Takes them for CUDA graphs; the list has those that were made."""
    from slipstream.models import graphs

    kind.made = []
    monkeypatch.setattr(graphs, "graph_on", lambda device: _lazily(kind))
    return kind.made


def _lazily(kind: type[RepeatedCall]):
    """why_not asks for one without using it."""

    class Lazy:
        def capture(self, run: Callable[[], Tensor]) -> Tensor:
            self.graph = kind()
            return self.graph.capture(run)

        def replay(self) -> None:
            self.graph.replay()

    return Lazy()


def addresses(cache) -> list[int]:
    return [x.data_ptr() for layer in cache.layers for x in (layer.state or {}).values()]
