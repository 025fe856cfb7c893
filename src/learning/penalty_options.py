"""Options of the KL penalty and of distillation, which change the advantages."""

from __future__ import annotations

from typing import Literal

import chz

from src.core.options import Options, above, at_least, finite, require


@chz.chz
class KlOptions(Options):
    """KL penalty"""

    kl_penalty_coef: float = chz.field(
        default=0.0,
        doc="Weight of the KL penalty towards the base model, which changes the advantages; 0: no penalty",
        validator=[at_least(0), finite],
    )
    kl_estimator: Literal["k1", "k2", "k3"] = chz.field(
        default="k1", doc="Schulman's estimator of the KL divergence at each token"
    )


@chz.chz
class DistillationOptions(Options):
    """Distillation"""

    teacher: str | None = chz.field(
        default=None,
        doc="On-policy distillation: a sampler checkpoint (tinker://...) or a model of the server, which "
        "scores the sampled tokens; None: no distillation",
    )
    teacher_coef: float = chz.field(
        default=1.0,
        doc="Each sampled token's advantage grows by teacher_coef * (teacher's minus sampler's logprob)",
        validator=[above(0), finite],
    )
    reward_coef: float = chz.field(
        default=1.0,
        doc="Factor of the advantages that rewards and the KL penalty give; 0: distillation alone",
        validator=[at_least(0), finite],
    )

    @chz.validate
    def _coefficients_need_a_teacher(self) -> None:
        require(
            self.teacher is not None or (self.teacher_coef == 1 and self.reward_coef == 1),
            "teacher_coef and reward_coef need teacher=tinker://... or teacher=MODEL; add it, or remove them",
        )
