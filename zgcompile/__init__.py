"""zgcompile: a sampled GNN training step, as its user wrote it, replayed as one CUDA Graph."""

from zgcompile import kernels as _kernels  # registers the ops
from zgcompile.errors import ZgError
from zgcompile.frontend.comparison import Report
from zgcompile.frontend.compiled_step import CompiledStep, compile
from zgcompile.frontend.stats import Stats
from zgcompile.frontend.verify import verify
from zgcompile.ir.envelope import Envelope

__all__ = ["CompiledStep", "Envelope", "Report", "Stats", "ZgError", "compile", "verify"]
__version__ = "0.1.0"
del _kernels
