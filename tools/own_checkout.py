"""ROOT, the checkout that a tool is of; the process ends if `slipstream` is another's.

    from own_checkout import ROOT

A virtual environment may have another checkout installed. A tool would then measure, hash or write
down that one, and say that nothing has changed.
"""

import sys
from pathlib import Path

import slipstream

ROOT = Path(__file__).resolve().parents[1]

_found = Path(str(slipstream.__file__)).resolve().parents[1]
if _found != ROOT:
    sys.exit(f"slipstream is that of {_found}, this tool that of {ROOT}: set PYTHONPATH={ROOT}")
