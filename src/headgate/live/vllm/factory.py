"""Makes the scheduler vLLM asked for: settings, policy, observers, and one line that says what is on."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.cost.likeness import Likeness
from headgate.live.engine.plug_in import EngineFacts, PlugIn, admit, likeness
from headgate.live.engine.policy import build_policy
from headgate.live.engine.process import LOG
from headgate.live.engine.requests import RequestTerms
from headgate.live.engine.settings import Settings
from headgate.live.vllm import VLLM
from headgate.live.vllm.plugin import Headgate
from headgate.live.vllm.seams import RELEASES, engine_number, faults, lockstep, version
from headgate.live.vllm.settings import read_settings


class SyncHeadgate(Headgate, Scheduler):
    pass


class AsyncHeadgate(Headgate, AsyncScheduler):
    pass


def make_scheduler(given: dict[str, Any]) -> Any:
    config = given["vllm_config"]
    try:
        settings = read_settings(config.additional_config)
        _refuse(settings, config)
        kind = AsyncHeadgate if config.scheduler_config.async_scheduling else SyncHeadgate
        scheduler = kind(**given)
        plug_in = PlugIn(settings, _facts(scheduler), lambda settings: _policy(settings, scheduler))
    except InputError as error:
        LOG.error("headgate: %s", error)
        raise
    plug_in.follow(lambda file: read_settings(config.additional_config, file))

    def terms(request: Any) -> RequestTerms:
        sampling = request.sampling_params
        return plug_in.promises(sampling.extra_args if sampling is not None else None)

    scheduler._headgate_begin(plug_in, terms)
    plug_in.begin(scheduler._headgate)
    interval = getattr(scheduler, "local_prefill_interval", 1)
    if interval > 1 and settings.policy != VLLM.name:
        LOG.warning("headgate: prefill_schedule_interval=%d is ignored while a policy decides", interval)
    return scheduler


def _refuse(settings: Settings, config: Any) -> None:
    """Releases that are too old or whose seams do not hold, and models without prefill and decode."""
    release = version()
    admit(RELEASES.problem(release, faults()), RELEASES.doubt(release), settings.force)
    model = config.model_config
    if model.runner_type == "pooling" or getattr(model, "is_diffusion", False):
        raise InputError(f"model {model.model} does not generate token by token; drop --scheduler-cls")


def _policy(settings: Settings, scheduler: Any) -> tuple[BatchPolicy, dict[str, Any]]:
    graph = getattr(scheduler.vllm_config.compilation_config, "max_cudagraph_capture_size", None)
    return build_policy(
        settings,
        VLLM,
        kv_tokens=_kv_tokens(scheduler),
        block=scheduler.block_size,
        max_model_len=scheduler.max_model_len,
        batch_tokens=scheduler.max_num_scheduled_tokens,
        running=scheduler._headgate_slots(),
        like=_like(scheduler.vllm_config),
        graph=graph if isinstance(graph, int) and graph > 0 else None,
        width=1 + scheduler.num_spec_tokens,
    )


def _like(config: Any) -> Likeness:
    """A GPU is asked for its name only through the driver's library."""
    from vllm.platforms import current_platform

    def gpu() -> str:
        return str(current_platform.get_device_name()) if current_platform.is_cuda() else ""

    ranks, ahead = config.parallel_config.tensor_parallel_size, config.scheduler_config.async_scheduling
    return likeness(config.model_config, ranks, ahead, gpu, version())


def _kv_tokens(scheduler: Any) -> int:
    """KV as the ledger counts it: one block is never used, and each group of layers takes its share."""
    groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
    return int((scheduler.cache_config.num_gpu_blocks - 1) * scheduler.block_size // groups)


def _facts(scheduler: Any) -> EngineFacts:
    config = scheduler.vllm_config
    limits = {
        VLLM.slots: scheduler._headgate_slots(),
        VLLM.budget: scheduler.max_num_scheduled_tokens,
        VLLM.longest: scheduler.max_model_len,
        "block_size": scheduler.block_size,
    }
    if scheduler.num_spec_tokens:
        limits["num_speculative_tokens"] = scheduler.num_spec_tokens
    return EngineFacts(
        names=VLLM,
        version=version(),
        model=str(config.model_config.model),
        kv_tokens=_kv_tokens(scheduler),
        limits=limits,
        engine=engine_number(config.parallel_config),
        asynchronous=isinstance(scheduler, AsyncHeadgate),
        priorities=scheduler.policy.value == "priority",
        lockstep=lockstep(config),
    )
