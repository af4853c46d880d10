"""What the router tells its operator: engines, plan, gauges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.live.route.upstream import Upstream

if TYPE_CHECKING:
    from headgate.live.route.app import RouterApp


def described(upstream: Upstream, app: RouterApp) -> dict[str, Any]:
    """One engine, for people and for scripts."""
    now = app.now()
    seat = app.gate.roster.replicas[upstream.id]
    return {
        "id": upstream.id,
        "url": upstream.url,
        "status": upstream.status(now),
        "role": seat.role,
        "seats": upstream.seats(now),
        "prompts": seat.prompts,
        "decodes": seat.decodes,
        "legs": upstream.legs,
        "foreign": upstream.foreign,
        "running": upstream.load.running,
        "waiting": upstream.load.waiting,
        "kv_usage": upstream.load.kv_usage,
        "first_token_s": round(upstream.first_token, 4),
        "breaker": upstream.breaker.state.value,
        "alarms": upstream.load.alarms,
    }


def plan(app: RouterApp) -> dict[str, Any]:
    """The router that decides, its gauges, and its newest plan."""
    gate = app.gate
    return {
        "router": app.config.router.name,
        "policy": type(gate.router).__name__,
        "fallen": gate.fallen,
        "gauges": gate.gauges(),
        "plan": app.policy.described(gate.seconds),
        "prompt_estimate_error": round(app.service.estimates.error, 4),
    }


def measure(app: RouterApp) -> None:
    """Set the gauges that are read rather than counted."""
    now, metrics = app.now(), app.metrics
    for upstream in app.upstreams.values():
        seats, load = upstream.seats(now), upstream.load
        values = {
            "up": float(upstream.up(now)),
            "seats": seats,
            "legs": upstream.legs,
            "foreign": upstream.foreign,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "first_token_seconds": upstream.first_token,
        }
        for name, value in values.items():
            metrics.engine[name].labels(str(upstream.id)).set(value)
    for kind, queue in app.gate.roster.queues.items():
        metrics.set("queue", len(queue), **{"class": kind})
    metrics.set("handoff", len(app.gate.roster.handoff))
    metrics.set("inflight", app.front.inflight)
    metrics.set("inflight_bytes", app.body_bytes.held)
    metrics.set("router_disabled", float(app.gate.fallen is not None))
    metrics.set("connections", app.server.open.held)
    metrics.set("refused_connections", app.server.refused)
    metrics.estimate.set(app.service.estimates.error)
    for name, value in app.gate.gauges().items():
        metrics.set("router_value", value, name=name)
