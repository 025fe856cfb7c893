"""The requirements of a task on its sandbox: the image to build and the network."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from harbor.models.task.config import EnvironmentConfig, NetworkMode

from src.core.errors import ConfigError
from src.envs.sandbox.dockerfile import USE_DOCKER, BuildPlan, parse_dockerfile
from src.envs.sandbox.network import why_no_network

DEBIAN_LIKE = re.compile(
    r"^(?:docker\.io/)?(?:library/)?(?:debian|ubuntu|buildpack-deps)(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?$"
)


class NetworkAccess(StrEnum):
    """The network of a task's sandbox."""

    PUBLIC = "public"
    OFF = "off"  # the task requests no network
    # LACKING and REFUSED mean that this machine cannot provide a public network. LACKING: nobody explicitly
    # requests a public network, so the task runs without a network. REFUSED: the task or the user requests a
    # public network, so the task cannot run.
    LACKING = "lacking"
    REFUSED = "refused"


def network_access(config: EnvironmentConfig, *, has_network_option: bool) -> NetworkAccess:
    """Return the network for a task. `has_network_option` tells whether environment_kwargs has
    `network=true`, which overrides task.toml.
    """
    if (
        config.network_mode != NetworkMode.PUBLIC or config.allow_internet is False
    ) and not has_network_option:
        return NetworkAccess.OFF
    if why_no_network() is None:
        return NetworkAccess.PUBLIC
    # When Harbor loads a task, it converts allow_internet to network_mode and sets allow_internet to None.
    # Only a configuration that Harbor did not load can therefore have a value in allow_internet.
    is_requested = (
        has_network_option or "network_mode" in config.model_fields_set or config.allow_internet is True
    )
    return NetworkAccess.REFUSED if is_requested else NetworkAccess.LACKING


def read_build_plan(environment_dir: Path, config: EnvironmentConfig) -> BuildPlan:
    """Read the build plan of a task's image. Without a Dockerfile, the plan has no steps, and `docker_image`
    must be debian, ubuntu or buildpack-deps. Raises ConfigError if the sandbox cannot build the image.
    """
    if (environment_dir / "docker-compose.yaml").exists():
        raise ConfigError(
            f"{environment_dir}/docker-compose.yaml: the sandbox cannot run several services; {USE_DOCKER}"
        )
    dockerfile = environment_dir / "Dockerfile"
    if dockerfile.is_file():
        return parse_dockerfile(dockerfile)
    if config.docker_image is None:
        raise ConfigError(
            f"{environment_dir}: no Dockerfile and no [environment].docker_image; add one of them"
        )
    if not DEBIAN_LIKE.match(config.docker_image):
        raise ConfigError(
            f"{environment_dir.parent}: the sandbox cannot replace the image {config.docker_image}; "
            f"{USE_DOCKER}"
        )
    return BuildPlan(environment={})


def image_warning(plan: BuildPlan) -> str | None:
    """Return a warning if a Dockerfile starts from an image that is not DEBIAN_LIKE, else None."""
    if plan.image is None or DEBIAN_LIKE.match(plan.image):
        return None
    return (
        f"the sandbox uses the programs of this machine in place of the image {plan.image}; "
        "environment_type=docker uses the image"
    )
