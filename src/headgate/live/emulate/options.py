"""Options of an emulator and of a predictor, each declared once; commands derive their flags from them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headgate.methods.latency import KINDS
from headgate.settings_base import (
    Count,
    Delay,
    NotNegative,
    Port,
    Positive,
    Seconds,
    SettingsModel,
    Share,
    Switch,
    Tokens,
    declared,
)

ENGINE, SERVER, OUTPUT, FAULTS, KV = "Engine", "Server", "Answers", "Faults", "KV transfer"
TRAFFIC = "Traffic"
MIB = 1024 * 1024
Engines = Annotated[int, Field(strict=True, ge=1, le=1024)]


class Options(SettingsModel):
    card: str = declared(ENGINE, "cost card: a name (see `headgate doctor`) or a file", "cal-h200-qwen3-8b")
    engine: Literal["vllm", "sglang"] = declared(
        ENGINE, "vllm or sglang: whose endpoints and metrics", "vllm"
    )
    policy: str = declared(
        ENGINE, "NAME, NAME:PARAMETER=VALUE,... or FILE.py:CLASS (with --engine sglang: sglang)", "mixed"
    )
    config: str | None = declared(
        ENGINE, "settings file of the plug-in (policy, promises, classes), read again when it changes"
    )
    slots: Count | None = declared(ENGINE, "requests at once, vLLM's max_num_seqs (default: 256)")
    budget: Count | None = declared(
        ENGINE, "tokens in one step, vLLM's max_num_batched_tokens (default: 8192)"
    )
    kv_tokens: Count | None = declared(ENGINE, "KV memory in tokens (default: the card's)")
    block: Count | None = declared(ENGINE, "KV tokens per block (default: the card's)")
    model_len: Count | None = declared(
        ENGINE, "most tokens of one request, prompt and output (default: the card's)"
    )
    speculate: str | None = declared(
        ENGINE, "speculative decoding, DRAFTS:accept=SHARE,..., as for `headgate simulate` (default: off)"
    )
    prefix_cache: Switch = declared(
        ENGINE,
        "find KV of equal prompts again, vLLM's --enable-prefix-caching",
        True,
        flag="--prefix-cache/--no-prefix-cache",
    )
    asynchronous: Switch | None = declared(
        ENGINE,
        "compose a step while the one before runs, as vLLM does (default: where the card has a host)",
        flag="--asynchronous/--no-asynchronous",
    )

    host: str = declared(SERVER, "address to listen on", "127.0.0.1")
    port: Port = declared(SERVER, "first port; 0: any free one", 8000)
    engines: Engines = declared(SERVER, "so many engines, on ports from --port on", 1)
    ranks: Switch = declared(SERVER, "all engines on one port, as data-parallel ranks", False)
    speed: Positive = declared(SERVER, "so many times faster than real time", 1.0)
    virtual: Switch = declared(SERVER, "virtual clock: answer at once, and stamp virtual times", False)
    hold: Count | None = declared(SERVER, "with --virtual: begin when so many requests are there")
    max_queued: Count | None = declared(SERVER, "503 when so many wait, vLLM's --max-num-queued-reqs")
    max_queued_tokens: Count | None = declared(SERVER, "the same in prompt tokens")
    max_requests: Count = declared(SERVER, "503 beyond so many requests in flight at a port", 4096)
    max_connections: Count = declared(SERVER, "503 beyond so many connections of a port", 10_000)
    body_limit: Count = declared(SERVER, "bytes of one body; beyond, 413", 32 * MIB)
    max_bytes: Count = declared(SERVER, "503 beyond so many bytes of bodies being read", 256 * MIB)
    shutdown_timeout: Delay = declared(SERVER, "time to drain after SIGTERM (default: 30s)", 30.0)
    out: str | None = declared(SERVER, "folder for what was served: traces, and run folders at the end")
    admin_port: Port | None = declared(SERVER, "port of the admin calls (default: none)")
    admin_host: str = declared(SERVER, "address of the admin calls", "127.0.0.1")

    model: str | None = declared(OUTPUT, "name of the model (default: the card's)")
    tokenizer: str | None = declared(OUTPUT, "tokenizer.json or its folder (default: 4 bytes are a token)")
    output: Tokens | None = declared(OUTPUT, "mean output tokens, where clients do not decide")
    output_law: str | None = declared(
        OUTPUT, "fixed, uniform, geometric, gamma, lognormal, lengths=FILE (default: uniform)"
    )
    trace: str | None = declared(OUTPUT, "output lengths drawn from a trace, such as azure-conv")
    echo: Switch = declared(OUTPUT, "answer with the prompt", False)
    prompt_tokens_details: Switch = declared(
        OUTPUT,
        "usage says how many prompt tokens were cached, as vLLM does with the same flag",
        False,
        flag="--enable-prompt-tokens-details",
    )

    fail_rate: Share = declared(FAULTS, "this share of the requests gets --fault", 0.0)
    fault: str = declared(FAULTS, "503, drop=20, stall=5, ...: see docs/emulate.md", "500")
    stall_at: Count | None = declared(FAULTS, "every stream stops after so many tokens")
    crash_after: Count | None = declared(FAULTS, "the engine dies after so many tokens")
    slow_start: Delay = declared(FAULTS, "time before anything listens, such as 20s", 0.0)
    fault_header: Switch = declared(FAULTS, "requests may name their fault: x-emulate-fault", True)

    kv_connector: Switch = declared(KV, "answer kv_transfer_params, as with NixlConnector", True)
    kv_lease: Delay = declared(KV, "emulated time that KV is kept for another engine (default: 30s)", 30.0)
    kv_load_failure: Literal["fail", "recompute"] = declared(
        KV, "when KV cannot be read: fail or recompute", "fail"
    )
    kv_hosts: tuple[str, ...] = declared(
        KV, "another machine from which KV may be read", (), flag="--kv-host"
    )
    transfer_delay: Delay = declared(KV, "to copy KV: before the first byte (default: 2ms)", 0.002)
    transfer_per_token: NotNegative = declared(
        KV, "to copy KV: seconds per token (default: 147456 bytes at 50 GB/s)", 147456 / 50e9
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.port and not self.ranks and self.port + self.engines > 65536:
            raise ValueError(
                f"port {self.port} leaves no room for {self.engines} engines; choose a lower one"
            )
        if self.config and {"policy", "virtual"} & self.model_fields_set:
            other = "--policy" if "policy" in self.model_fields_set else "--virtual"
            raise ValueError(f"--config names the policy, and is read again in real time; drop {other}")
        if self.engine == "sglang" and self.kv_connector and "kv_connector" in self.model_fields_set:
            raise ValueError("--kv-connector is vLLM's hand-over of KV; drop it, or --engine sglang")
        if self.hold and not self.virtual:
            raise ValueError("--hold is for a virtual clock; add --virtual or drop it")
        return self


class PredictOptions(SettingsModel):
    card: str = declared(ENGINE, "cost card: a name (see `headgate doctor`) or a file", "cal-h200-qwen3-8b")
    policy: str = declared(ENGINE, f"what schedules the engines: {', '.join(KINDS)}", "mixed")
    slots: Count | None = declared(ENGINE, "requests at once, vLLM's max_num_seqs (default: 256)")
    budget: Count | None = declared(
        ENGINE, "tokens in one step, vLLM's max_num_batched_tokens (default: 8192)"
    )
    kv_tokens: Count | None = declared(ENGINE, "KV memory in tokens (default: the card's)")
    tbt: Seconds = declared(ENGINE, "with --policy keep: the promised gap (default: 100ms)", 0.1)
    asynchronous: Switch | None = declared(
        ENGINE,
        "engines compose a step while the one before runs (default: where the card has a host)",
        flag="--asynchronous/--no-asynchronous",
    )
    prompt: Tokens = declared(TRAFFIC, "mean prompt tokens, until rows tell", 1000.0)
    output: Tokens = declared(TRAFFIC, "mean output tokens", 200.0)
    streaming: Switch = declared(
        TRAFFIC,
        "llm-d's router runs with streamingMode; else it reads ttft_ms as the time of the whole answer",
        True,
        flag="--streaming/--no-streaming",
    )
    host: str = declared(SERVER, "address to listen on", "127.0.0.1")
    port: Port = declared(SERVER, "port; 0: any free one", 8001)
    body_limit: Count = declared(SERVER, "bytes of one body; beyond, 413", 8 * MIB)
