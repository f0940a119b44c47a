"""vLLM's parts, put together as `vllm serve` does: arguments, engine, application.

The only module that imports vLLM. Its entry points have moved between releases while their
signatures stayed, so each is looked for in the places it has had within the tested range.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from worker.engine import vllm_patches
from worker.engine.interface import AdapterError, App, EngineStartError
from worker.engine.plugin import MARK
from worker.engine.vllm_load import Gauge
from worker.engine.vllm_proxy import EngineProxy
from worker.engine.vllm_resume import MakeStep

OLDEST, TOO_NEW = (0, 24), (0, 34)

PLACES = {
    "make_arg_parser": (
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "build_app": (
        "vllm.entrypoints.launchers.app",
        "vllm.entrypoints.openai.api_server",
    ),
    "init_app_state": (
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.launchers.app_state",
        "vllm.entrypoints.openai.api_server",
    ),
}

REFUSED = ("headless", "grpc")
"""Flags of `vllm serve` that ask for something else than an engine that answers here."""


def prepare_environment(args: Sequence[str]) -> None:
    """Set what vLLM reads from the environment, before it is imported, unless the user did."""
    os.environ[MARK] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # This process has threads and open connections: a fork would copy them half.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if Path(model_of(args), "config.json").is_file():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The gateway authenticates; with this the application would refuse the worker's own calls.
    os.environ.pop("VLLM_API_KEY", None)


def model_of(args: Sequence[str]) -> str:
    """Find the model in arguments that can't be parsed yet; `?` if a config file names it."""
    if args and not args[0].startswith("-"):
        return args[0]
    for flag, value in pairwise(args):
        if flag == "--model":
            return value
    return "?"


def check_version() -> str:
    """Return vLLM's version. Raises `EngineStartError` if it isn't there or wasn't tested."""
    try:
        # Not the distribution's metadata: builds for other hardware have other names.
        from vllm import __version__ as version
    except ImportError as error:
        raise EngineStartError(f"vLLM can't be imported: {error}") from error
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise EngineStartError(f"vLLM's version {version!r} can't be read") from None
    if not OLDEST <= (major, minor) < TOO_NEW:
        raise EngineStartError(
            f"vLLM {version} is outside the range this release was tested with: "
            f"{join(OLDEST)} up to, not including, {join(TOO_NEW)}"
        )
    return str(version)


def join(version: tuple[int, int]) -> str:
    """Write a version as people do."""
    return ".".join(map(str, version))


def find(name: str) -> Any:
    """Import an entry point of vLLM from where this release keeps it."""
    for place in PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except ModuleNotFoundError as error:
            # Only the place itself may be missing; a missing dependency must be heard of.
            if not place.startswith(error.name or "?"):
                raise
        except AttributeError:
            continue
    raise EngineStartError(f"vLLM keeps {name} in none of {', '.join(PLACES[name])}")


def cli_args() -> ModuleType:
    """Import the module of vLLM that knows the arguments of `vllm serve`."""
    return importlib.import_module(find("make_arg_parser").__module__)


def parse_args(args: Sequence[str]) -> Namespace:
    """Parse what follows `vllm serve`, config file included."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise EngineStartError(f"vllm serve's arguments: {message}")

    parser = FlexibleArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    serve = cli_args().make_arg_parser(serve)
    # argparse would print its usage and leave the process.
    parser.error = serve.error = refuse
    parsed: Namespace = parser.parse_args(["serve", *args])
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    for flag in REFUSED:
        if getattr(parsed, flag, False):
            refuse(f"--{flag} is not for a worker")
    if (parsed.api_server_count or 1) > 1:
        refuse("--api-server-count is not for a worker: start more workers")
    parsed.api_server_count = None
    # Authentication is the gateway's, and the worker's calls carry no key.
    parsed.api_key = None
    cli_args().validate_parsed_serve_args(parsed)
    return parsed


def create_llm(parsed: Namespace, gauge: Gauge, checkpoint: Callable[[], None]) -> Any:
    """Start the engine: minutes, for a large model. `checkpoint` may raise to stop half way."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    load_parser_plugins(parsed)
    engine_args = AsyncEngineArgs.from_cli_args(parsed)
    if hasattr(cli_args(), "propagate_flash_late_interaction"):
        cli_args().propagate_flash_late_interaction(parsed, engine_args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    checkpoint()
    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=context,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
        stat_loggers=[stat_logger(gauge)],
    )


def load_parser_plugins(parsed: Namespace) -> None:
    """Import the user's own parsers, which only `vllm serve` itself does."""
    if parsed.tool_parser_plugin:
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(parsed.tool_parser_plugin)
    if parsed.reasoning_parser_plugin:
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(parsed.reasoning_parser_plugin)


def stat_logger(gauge: Gauge) -> Any:
    """Make the class through which vLLM tells each step's statistics."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class GaugeLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kw: Any) -> None:
            gauge.record(self.index, scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    return GaugeLogger


def create_proxy(
    llm: Any, *, default_max_tokens: int, max_tokens_ceiling: int, continues: bool
) -> EngineProxy:
    """Put the proxy before the engine."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return EngineProxy(
        llm,
        default_max_tokens=default_max_tokens,
        max_tokens_ceiling=max_tokens_ceiling,
        dead_error=EngineDeadError,
        generate_error=EngineGenerateError,
        delta_kind=RequestOutputKind.DELTA,
        make_step=step_maker() if continues else None,
    )


def step_maker() -> MakeStep:
    """Return what makes a step of the engine out of a recorded one."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    def make(request_id: str, tokens: list[int], finish: str | None, stop: int | str | None) -> Any:
        reason = None if finish is None else FinishReason[finish.upper()]
        return EngineCoreOutput(request_id, tokens, finish_reason=reason, stop_reason=stop)

    return make


def why_not_continue(llm: Any) -> str:
    """Say why this engine can't go on with answers that others began; empty if it can."""
    version, config = check_version(), llm.vllm_config
    if not vllm_patches.applies_to(version):
        return f"vLLM {version} isn't a release on which it was tested"
    if config.parallel_config.distributed_executor_backend not in ("uni", "mp"):
        return "only engines in processes of this machine can be prepared for it"
    for kind in ("pipeline", "data"):
        if getattr(config.parallel_config, f"{kind}_parallel_size") > 1:
            return f"it wasn't tested with {kind} parallelism"
    for feature in ("speculative_config", "kv_transfer_config", "ec_transfer_config"):
        if getattr(config, feature, None) is not None:
            return f"it wasn't tested with {feature}"
    return ""


async def see_continued(llm: Any) -> str:
    """Have the engine continue a made-up answer; return what is wrong, empty if nothing is.

    An engine whose processes don't have the plugin (`VLLM_PLUGINS` can exclude it) would begin
    anew, and nothing else would tell. The answer said one of two words all the time: the penalty
    makes the other one follow, if all parts of the engine know what was said.
    """
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    said, other, times = 100, 101, 50
    params = SamplingParams(
        temperature=0,
        max_tokens=times + 1,
        frequency_penalty=2,
        logit_bias={said: times},
        allowed_token_ids=[said, other],
        output_kind=RequestOutputKind.DELTA,
        extra_args={vllm_patches.KEY: [said] * times},
    )
    prompt = TokensPrompt(prompt_token_ids=[said])
    outputs = llm.generate(prompt, params, "headrace-continued")
    try:
        (choice,) = (await anext(outputs)).outputs
    finally:
        await outputs.aclose()
    if choice.finish_reason is None:
        return "the engine's processes don't have Headrace's plugin"
    if list(choice.token_ids) != [other]:
        return "the engine doesn't take into account what was said"
    return ""


async def create_app(proxy: EngineProxy, parsed: Namespace, tasks: Sequence[str]) -> App:
    """Build vLLM's HTTP application on the proxy."""
    app: Any = find("build_app")(parsed, tasks, proxy.model_config)
    await find("init_app_state")(proxy, app.state, parsed, tasks)
    # What uvicorn's server would be: the application sets it when it meets a dead engine.
    app.state.server = SimpleNamespace(should_exit=False)
    for name in ("openai_serving_chat", "openai_serving_completion"):
        serving: Any = getattr(app.state, name, None)
        if hasattr(serving, "beam_search"):
            serving.beam_search = proxy.limited_beams(serving.beam_search)
    return app  # type: ignore[no-any-return]


def adapters_of(app: Any) -> Any:
    """Return the part of vLLM's application that keeps its names of models, adapters included."""
    return app.state.openai_serving_models


async def load_adapter(adapters: Any, name: str, source: str) -> None:
    """Do what vLLM's `/v1/load_lora_adapter` does. Raises `AdapterError`."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    request = LoadLoRAAdapterRequest(lora_name=name, lora_path=source)
    check(await adapters.load_lora_adapter(request))


async def unload_adapter(adapters: Any, name: str) -> None:
    """Do what vLLM's `/v1/unload_lora_adapter` does. Raises `AdapterError`."""
    from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

    check(await adapters.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))


def check(answer: Any) -> None:
    """Raise what vLLM says of an adapter, unless that is that it is done."""
    if not isinstance(answer, str):
        raise AdapterError(answer.error.message)


def count_seats(llm: Any) -> int:
    """Count the requests that run at once; each core of a data-parallel engine has its own."""
    config = llm.vllm_config
    return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)


async def log_statistics(llm: Any) -> None:
    """Let vLLM log its throughput; it gathers lists in memory until it does."""
    from vllm import envs

    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        await llm.do_log_stats()


def silence(llm: Any) -> None:
    """End an idle engine's reading of outputs, which would take the shutdown for a failure.

    Not while requests run: through this task they learn that they have ended.
    """
    if (
        llm is not None
        and llm.output_handler is not None
        and not llm.output_processor.request_states
    ):
        llm.output_handler.cancel()


def close_sockets(llm: Any) -> None:
    """Close what vLLM's shutdown leaves open, in the event loop that its sockets belong to."""
    llm.engine_core.resources.ctx.destroy(linger=0)


def describe_failure(llm: Any) -> str:
    """Say what a failed engine is known to have died of."""
    manager: Any = getattr(llm.engine_core.resources, "engine_manager", None)
    codes = manager.finished_procs() if hasattr(manager, "finished_procs") else {}
    if codes:
        ended = ", ".join(f"{name} with exit code {code}" for name, code in codes.items())
        return f"the engine's process ended: {ended}"
    return "the engine failed; vLLM's log has the cause"
