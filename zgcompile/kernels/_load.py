"""Finds the compiled CUDA kernels, `zgcompile._native`, at the first use."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from zgcompile.errors import InternalError


@functools.cache
def native() -> ModuleType | None:
    """The extension module, or None where the wheel was built without nvcc: the torch references then run on CUDA too.

    Raises InternalError when the module is installed but does not load.
    """
    try:
        return importlib.import_module("zgcompile._native")
    except ModuleNotFoundError as error:
        if error.name != "zgcompile._native":
            raise
        return None
    except ImportError as error:
        raise InternalError(
            f"zgcompile._native is installed but does not load: {error}", advice="reinstall zgcompile on this machine"
        ) from error
