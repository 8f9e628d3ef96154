"""What a profile says of the model and the machine that a server runs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from vllm.logger import init_logger

from horizonserve import facts, profile
from horizonserve.config import ConfigError, Settings
from horizonserve.policy.estimate import Curve
from horizonserve.slo import RequestClass

logger = init_logger(f"vllm.{__name__}")


def curves(settings: Settings, vllm_config: Any) -> dict[RequestClass, Curve]:
    """The curves of the profile that the settings name; none without one.

    Raises:
        ConfigError: it is of another platform, model or version, and that was not allowed.
    """
    if settings.profile is None:
        return {}  # and the device is left alone
    found = read(settings, facts.platform(), model(vllm_config))
    # Who says what a class takes is believed, as a start.
    said = settings.estimate_ms
    return {name: curve(one) for name, one in found.classes.items() if name not in said}


def read(
    settings: Settings,
    platform: profile.Platform | None = None,
    model: profile.Model | None = None,
) -> profile.Profile:
    """The profile that the settings name, which they must; what is None is not compared.

    Raises:
        ConfigError: it is of another platform, model or version, and that was not allowed.
    """
    assert settings.profile is not None
    found = profile.load(settings.profile)
    different = found.differences(
        platform or found.platform, model or found.model, facts.versions()
    )
    if different:
        what = f"profile={settings.profile!r}: {'; '.join(different)}"
        if settings.profile_mismatch == "refuse":
            raise ConfigError(
                f"{what}; make one with `horizon-profile slo`, or set profile_mismatch=warn"
            )
        logger.warning("HorizonServe: %s; used all the same", what)
    return found


def curve(one: profile.ClassProfile) -> Curve:
    """The first responses of a class; times in seconds."""
    per_token_s = one.per_answer_token_ms / 1e3
    answer_tokens = median(size.answer_tokens for size in one.sizes)
    return Curve(
        (
            (
                size.prompt_tokens,
                size.first_p50_ms / 1e3 - per_token_s * (size.answer_tokens - answer_tokens),
            )
            for size in one.sizes
        ),
        answer_tokens,
        per_token_s,
    )


def model(vllm_config: Any) -> profile.Model:
    """The model of this stage."""
    model_config = vllm_config.model_config
    text = model_config.hf_text_config
    return profile.Model(
        name=Path(str(model_config.model)).name,
        architecture=model_config.architecture,
        hidden_size=getattr(text, "hidden_size", None),
        layers=getattr(text, "num_hidden_layers", None),
        dtype=str(model_config.dtype).removeprefix("torch."),
    )
