"""SIGINT and SIGTERM asked for politely: noted, so that the run can stop where nothing is lost."""

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """From `with` on, the first signal only sets `requested`; a second one acts as it always did.

    Made before anything slow happens, so that no moment of a run is unprotected.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        self._before = {s: signal.signal(s, self._request_stop) for s in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        signal.signal(number, self._before[self.requested])
