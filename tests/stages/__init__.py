"""The tests of the stages, and what several of them need."""

import importlib
import pkgutil

from numba_flash import stages


def modules():
    """The package of the stages and every module in it: where a test puts its own `launch` in place of the engine's."""
    names = (module.name for module in pkgutil.iter_modules(stages.__path__, f"{stages.__name__}."))
    return [stages, *map(importlib.import_module, names)]
