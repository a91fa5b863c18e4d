"""What is left in Megatron and Miles themselves that only a GPU machine, or an older numpy, has."""

import contextlib
import importlib.util

import numpy
import torch


class OlderNumpy:
    """numpy, under a version that Miles accepts."""

    __version__ = "1.26.4"

    def __getattr__(self, name):
        return getattr(numpy, name)


def install():
    import megatron.core.tensor_parallel as parallel
    import megatron.core.tensor_parallel.random as random_states

    @contextlib.contextmanager
    def fork(self, name=None):
        yield

    def seed_all(seed, *args, **kwargs):
        torch.manual_seed(seed)

    random_states.CudaRNGStatesTracker.fork = fork
    random_states.model_parallel_cuda_manual_seed = parallel.model_parallel_cuda_manual_seed = seed_all
    if importlib.util.find_spec("miles"):
        import miles.backends.megatron_utils.initialize as initialize

        initialize.np = OlderNumpy()
        import hf_load

        hf_load.install()
