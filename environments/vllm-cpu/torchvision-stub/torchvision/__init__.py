"""Names without code.

torchvision on the index is a CUDA build; beside the CPU build of torch its import fails, and with it every import of
vLLM's Qwen3.5 module, which reaches torchvision only for pictures. Text models call nothing of it. Every name under
torchvision resolves to an empty class or module here; using one raises what an empty class raises.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.28.0+stub"

_MODULES = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops")


class _Names(type):
    """A class whose unknown attributes are 0: transformers reads enumerations such as InterpolationMode.BICUBIC."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def _placeholder(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{module}.{name}"
    return sys.modules.get(full) or _Names(name, (), {"__module__": module})


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        return _placeholder(self.__name__, name)


for _name in _MODULES:
    _full = f"{__name__}.{_name}"
    _module = sys.modules[_full] = _Module(_full)
    _module.__spec__ = ModuleSpec(_full, None, is_package=True)


def __getattr__(name):
    return _placeholder(__name__, name)
