"""The kernels that the installed release of Triton runs; `make test-newest` has another one than
the rest."""

from slipstream.compiler.compiler_state import uses_gluon
from slipstream.compiler.known_bugs import INTERPRETER, blocking
from slipstream.compiler.toolchain import triton_version

RELEASE = triton_version() or "0"
# sm_90's own kernels
HAS_GLUON = uses_gluon("sm_90", RELEASE)
# kernels in its interpreter
INTERPRETS = not blocking(INTERPRETER, RELEASE, None, ())
