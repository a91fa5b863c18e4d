"""Modules that the trainers import and, on a CPU, never use."""

import enum
import importlib.machinery
import sys
import types


class Interpolation(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode:
    RGB = "RGB"
    UNCHANGED = "UNCHANGED"
    GRAY = "GRAY"


class Unusable:
    """A class or function that is only named."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError("a stand-in: there is no such module on this machine")


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Unusable


def install():
    # transformers looks for torchvision once, when it is first used: it has to see that there is none.
    import transformers.utils.import_utils as probes
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer  # noqa: F401

    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if hasattr(probes, name):
            getattr(probes, name)()
    for name in ("torchvision", "mooncake"):
        for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".engine"):
            _add(name + part)
    for part in ("", ".transforms.v2", ".transforms", ".transforms.functional", ".transforms.v2.functional"):
        _add("torchvision" + part).InterpolationMode = Interpolation
    # Miles' main branch names it; the SGLang that the wheel of miles-rl brings is older.
    sys.modules["sglang.srt.entrypoints.openai.encoding_dsv4"] = StandIn("encoding_dsv4")
    sys.modules["torchvision"].__version__ = "0.28.0"
    sys.modules["torchvision.io"].ImageReadMode = ImageReadMode


def _add(name):
    if name not in sys.modules:
        module = sys.modules[name] = StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_add(parent), child, module)
    return sys.modules[name]
