"""Lets PyPI's torchvision be imported beside a CPU torch, by declaring two operators that it only names."""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; the first look for torchvision declares the operators."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # The declarations live as long as the library does.
            sys.modules[__name__].library = self.library


sys.meta_path.insert(0, BeforeTorchvision())
