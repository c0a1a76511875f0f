"""The tests of the stages, and what several of them need."""

import importlib
import pkgutil

from numba_flash import stages


def modules():
    """The package of the stages and the modules of those that run everywhere: where a test puts its own `launch`."""
    names = [module.name for module in pkgutil.iter_modules(stages.__path__) if module.name.startswith(stages.PORTABLE)]
    return [stages, *(importlib.import_module(f"{stages.__name__}.{name}") for name in names)]
