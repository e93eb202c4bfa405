"""CPUs as a platform of verl, for tests and laptops. verl imports it in every process: VERL_USE_EXTERNAL_MODULES.

Ray places the training processes by logical GPUs: `ray start --num-gpus=1`.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> Any:
    """torch.cpu, with the functions of torch.cuda that verl calls."""
    module: Any = types.ModuleType("agentfly_torch_cpu")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    for name in ("empty_cache", "set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect", "manual_seed"):
        setattr(module, name, lambda *_, **__: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    module.manual_seed_all = module.manual_seed
    module.mem_get_info = lambda *_, **__: (8 << 30, 16 << 30)
    module.current_device = lambda: torch.device("cpu")
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_device_name = lambda *_: "cpu"
    return module


_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):  # type: ignore[misc]
    """What verl asks of a platform, answered for CPUs."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)

    is_available = staticmethod(_MODULE.is_available)
    current_device = staticmethod(_MODULE.current_device)
    device_count = staticmethod(_MODULE.device_count)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    # Without effect on a CPU.
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = (
        staticmethod(lambda *_, **__: None)
    )
    get_device_capability = staticmethod(lambda device_index=0: (None, None))
    communication_backend_name = staticmethod(lambda: "gloo")
    visible_devices_envvar = staticmethod(lambda: "AGENTFLY_VISIBLE_DEVICES")
    nvtx_range = staticmethod(lambda msg: contextlib.nullcontext())
    ray_resource_name = staticmethod(lambda: "GPU")  # logical ones
    ray_noset_envvars = staticmethod(list[str])
    is_ipc_supported = staticmethod(lambda: False)
