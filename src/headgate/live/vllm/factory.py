"""Makes the scheduler vLLM asked for: settings, policy, observers, and one line that says what is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo
from headgate.cost.likeness import Likeness, shape_of
from headgate.live.engine.events import RAISED, LiveObserver
from headgate.live.engine.observers import Facts, Watcher, close, connect, engine_number, observers, renewed
from headgate.live.vllm.fields import LOG, OBSERVE, Settings
from headgate.live.vllm.plugin import Duties, Headgate, Renewal
from headgate.live.vllm.reload import Reload, Renewals
from headgate.live.vllm.requests import promises
from headgate.live.vllm.seams import faults, unsupported, version
from headgate.live.vllm.settings import build_policy, file_of, read_settings


class Watched:
    """The end of the engine is the end of those who watch it."""

    _headgate_watchers: Sequence[Watcher] = ()
    _headgate_renewals: Renewals | None = None

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        self._headgate.tell()  # type: ignore[attr-defined]
        close(self._headgate_watchers)
        if self._headgate_renewals is not None:
            self._headgate_renewals.close()


class SyncHeadgate(Watched, Headgate, Scheduler):
    """For engines that know the tokens of a step before they compose the next."""


class AsyncHeadgate(Watched, Headgate, AsyncScheduler):
    """For engines that compose the next step while one runs."""


class Says(LiveObserver):
    """The one event nobody may miss."""

    def fell_back(self, reason: str, now: float, cause: str = RAISED) -> None:
        LOG.error("headgate: FALLEN BACK to vLLM's own scheduling after %.1f s: %s", now, reason)


def make_scheduler(given: dict[str, Any]) -> Any:
    """The scheduler, or one line that says why not."""
    config = given["vllm_config"]
    try:
        settings = read_settings(config.additional_config)
        _refuse(settings, config)
        made = AsyncHeadgate if config.scheduler_config.async_scheduling else SyncHeadgate
        scheduler = made(**given)
        policy, parameters = _policy(settings, scheduler)
        scheduler._headgate_watchers = watchers = _watchers(settings, scheduler, parameters)
    except InputError as error:
        LOG.error("headgate: %s", error)
        raise
    state = {"settings": settings}
    scheduler._headgate_renewals = renewals = _renewals(settings, scheduler)
    scheduler._headgate_begin(
        Duties(
            policy,
            (Says(), *watchers),
            settings.watchdog,
            lambda request: _said(request, state["settings"]),
            _renewal(state, scheduler, renewals),
        )
    )
    connect(watchers, scheduler._headgate.counts)
    _announce(settings, scheduler, parameters)
    return scheduler


def _refuse(settings: Settings, config: Any) -> None:
    """What we cannot serve: unknown releases, and models that have no prefill and decode."""
    problems = [unsupported(version()), *(f"vLLM's scheduler has changed: {fault}" for fault in faults())]
    found = [problem for problem in problems if problem]
    if found and settings.force:
        LOG.warning("headgate: forced, although %s", "; ".join(found))
    elif found:
        raise InputError("; ".join(found))
    model = config.model_config
    if model.runner_type == "pooling" or getattr(model, "is_diffusion", False):
        raise InputError(f"model {model.model} does not generate token by token; drop --scheduler-cls")


def _policy(settings: Settings, scheduler: Any) -> tuple[BatchPolicy | None, dict[str, Any]]:
    """The policy for this engine's limits; None when vLLM is only to be observed."""
    if settings.policy == OBSERVE:
        return None, {}
    return build_policy(
        settings,
        kv_tokens=_kv_tokens(scheduler),
        block=scheduler.block_size,
        max_model_len=scheduler.max_model_len,
        batch_tokens=scheduler.max_num_scheduled_tokens,
        running=scheduler._headgate_seats(),
        like=_like(scheduler.vllm_config),
        graph=_graph(scheduler.vllm_config),
    )


def _graph(config: Any) -> int | None:
    """Tokens of the engine's largest CUDA graph; None where it has none or does not say."""
    size = getattr(config.compilation_config, "max_cudagraph_capture_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _like(config: Any) -> Likeness:
    """What engine this is, for cards; a GPU is asked for its name only through the driver's library."""
    from vllm.platforms import current_platform

    model = config.model_config
    settings = {
        "tensor parallel": str(config.parallel_config.tensor_parallel_size),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype).removeprefix("torch."),
        "asynchronous scheduling": str(bool(config.scheduler_config.async_scheduling)),
    }
    try:
        gpu = str(current_platform.get_device_name()) if current_platform.is_cuda() else ""
    except Exception:  # a platform that cannot say what it is
        gpu = ""
    return Likeness(shape_of(model.hf_text_config), ".".join(map(str, version())), gpu, settings)


def _kv_tokens(scheduler: Any) -> int:
    """KV as the ledger counts it: one block is never used, and each group of layers takes its share."""
    groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
    return int((scheduler.cache_config.num_gpu_blocks - 1) * scheduler.block_size // groups)


def _said(request: Request, settings: Settings) -> tuple[str, Slo, int | None]:
    """Class, promises and guess of a request."""
    sampling = request.sampling_params
    return promises(sampling.extra_args if sampling is not None else None, settings)


def _renewals(settings: Settings, scheduler: Any) -> Renewals | None:
    """Watches the settings file, where there is one."""
    path = file_of()
    if path is None:
        return None
    reload = Reload(path, scheduler.vllm_config.additional_config)
    return Renewals(reload, settings, lambda new: _policy(new, scheduler), lambda: _fallen(scheduler))


def _fallen(scheduler: Any) -> bool:
    live = getattr(scheduler, "_headgate", None)  # not there yet while the engine starts
    return live is not None and live.fallen is not None


def _renewal(
    state: dict[str, Settings], scheduler: Any, renewals: Renewals | None
) -> Callable[[], Renewal | None]:
    """Asked by the engine's thread between two plans: a policy that is ready takes over."""
    if renewals is None:
        return lambda: None

    def renew() -> Renewal | None:
        ready = renewals.take()
        if ready is None:
            return None
        state["settings"] = settings = ready.settings
        LOG.warning("headgate: settings read again from %s", file_of())
        renewed(scheduler._headgate_watchers, settings.policy, ready.parameters, scheduler._headgate.now)
        _announce(settings, scheduler, ready.parameters)
        return Renewal(ready.policy)

    return renew


def _watchers(settings: Settings, scheduler: Any, parameters: dict[str, Any]) -> list[Watcher]:
    """Metrics and, where asked for, the trace."""
    config = scheduler.vllm_config
    limits = {
        "max_num_seqs": scheduler._headgate_seats(),
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": scheduler.max_model_len,
        "block_size": scheduler.block_size,
    }
    facts = Facts(
        model=str(config.model_config.model),
        vllm=".".join(map(str, version())),
        kv_tokens=_kv_tokens(scheduler),
        limits=limits,
        engine=engine_number(config.parallel_config),
    )
    return observers(settings, parameters, facts)


def _announce(settings: Settings, scheduler: Any, parameters: dict[str, Any]) -> None:
    words = ", ".join(f"{name}={value}" for name, value in parameters.items())
    LOG.info(
        "headgate: policy %s(%s), card %s, %s scheduling, %d seats, %d tokens a step, %d KV tokens",
        settings.policy,
        words,
        settings.card or ("none, step times are learned" if settings.learns() else "none"),
        "asynchronous" if isinstance(scheduler, AsyncHeadgate) else "synchronous",
        scheduler._headgate_seats(),
        scheduler.max_num_scheduled_tokens,
        scheduler._headgate.ledger.kv_total,
    )
    if scheduler.policy.value == "priority" and (said := settings.priorities_said()):
        LOG.warning("headgate: %s", said)
