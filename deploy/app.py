"""The Serve application: one deployment, `LLMReplica`, whose replicas are TP groups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.serve import Application
from ray.util import get_current_placement_group

from spectrue.deploy.config import ServerConfig
from spectrue.deploy.http_errors import OVERLOADED_RETRY_AFTER
from spectrue.deploy.replica import LLMReplica
from spectrue.workers.model_store import resolve_model
from spectrue.workers.ray_actor import RANK_CPUS, gpus_of_rank, start_ranks
from spectrue.workers.tokenizer import load_tokenizer

DEPLOYMENT = "LLMReplica"
REPLICA_CPUS = 0.5
ROOM = 64  # requests beside those the engine holds: /health, /v1/models, and ones that get a 4xx


class RayReplica(LLMReplica):
    """A replica that starts its own ranks, in the bundles of its placement group."""

    def __init__(self, config: ServerConfig) -> None:
        group = get_current_placement_group()
        with ThreadPoolExecutor(1) as thread:  # Ray's blocking calls do not belong on a loop
            ranks = thread.submit(start_ranks, config.engine, group).result()
        tokenizer = load_tokenizer(resolve_model(config.engine.model))
        super().__init__(config, ranks, tokenizer)


def build_app(config: ServerConfig) -> Application:
    return serve.deployment(serve.ingress()(RayReplica), **deployment_options(config)).bind(config)


def deployment_options(config: ServerConfig) -> dict[str, Any]:
    engine, settings = config.engine, config.serve
    bundles: list[dict[str, float]] = [{"CPU": RANK_CPUS} for _ in range(engine.tp_size)]
    bundles[0] = {"CPU": REPLICA_CPUS + RANK_CPUS}
    if gpus_of_rank(engine):
        bundles = [bundle | {"GPU": gpus_of_rank(engine)} for bundle in bundles]
    return {
        "name": DEPLOYMENT,
        "num_replicas": settings.num_replicas,
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
        # The engine sheds first, with what it knows; Serve's limits are behind it.
        "max_ongoing_requests": engine.max_num_seqs + engine.max_queue_len + ROOM,
        "max_queued_requests": settings.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": OVERLOADED_RETRY_AFTER},
        # Serve counts three failures, which is fixed; a replica that knows better exits at once.
        "health_check_period_s": settings.health_check_period,
        "health_check_timeout_s": settings.heartbeat_timeout + settings.health_check_period,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout,
        "max_constructor_retry_count": 2,  # a checkpoint that does not load will not load later
    }
