"""The report on one layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Fig. 2)."""

from typing import Any

from mechicl.reports import one_layer_parts as measured
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.kind import ALGORITHM, FINETUNING, HEADS, Part
from mechicl.reports.one_layer_setting import OneLayerSetting, exact_optimum
from mechicl.reports.verdict import NEAR, percent
from mechicl.viz.page import table


class OneLayer(OneLayerSetting):
    """Every seed's layer against tuned gradient descent in all ways of section 3, the nearest algorithms, the head."""

    @property
    def title(self) -> str:
        """Of the page."""
        return f"One layer and one step of gradient descent ({self.study.name})"

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        return (
            f"{self.study.name}: {len(self.seeds)} seeds of one linear self-attention layer on {self.task.n_context} "
            f"points in {self.task.x_dim} dimensions, compared with one step of gradient descent on "
            f"{len(self.prompts):,} held-out prompts (seed {self.seed}; von Oswald et al. 2023). Losses are mean "
            f"squared errors of the query's prediction; the paper plots half of that. Intervals are 95%, over the "
            f"held-out prompts or over the training seeds. {self.study.chosen}"
        ).rstrip()

    @property
    def data(self) -> dict[str, Any]:
        """What the numbers are of."""
        return {
            "checkpoint": self.study.name,
            "command": self.study.record.get("command"),
            "seeds": self.seeds,
            "n_prompts": len(self.prompts),
            "prompt_seed": self.seed,
            "tuned_step_size": self.step_size,
            "tuned_eta": self.step_size * self.task.n_context,
        }

    def weights_in_words(self) -> str:
        """Whether the step of gradient descent nearest to the weights predicts what the opened seed predicts."""
        fit = self.fit
        distance, ratio = fit.relative_distances(fit.projected)[0], fit.loss_ratios(fit.projected)[0]
        size = fit.projected.parameters["step_size"][0, 0].item()
        read = f"The step of gradient descent nearest to its weights (step size {size:.3g})"
        if distance.mean <= NEAR:
            return f"{read} leaves {percent(distance)} of its squared predictions: the weights agree."
        return (
            f"{read} leaves {percent(distance)} of its squared predictions and has {ratio.mean:.2g} times its loss: "
            f"the weights do not show gradient descent."
        )

    def provenance(self) -> Measured:
        """Errata of the papers that concern the page, and how the checkpoint and the page were made."""
        task, record = self.task, self.study.record
        half, exact = self.descent_errors.mean().item() / 2, exact_optimum(task)
        errata = [
            ("von Oswald et al., section 3", "η multiplies the mean gradient. The step size a of this package "
             f"multiplies the sum: η = a n. Tuned here: a = {self.step_size:.4f}, "
             f"η = {self.step_size * task.n_context:.4f}."),
            ("Nertinger, section 2", "Preconditioned gradient descent is printed with a plus sign before the gradient; "
             "the sign is minus."),
        ]  # fmt: skip
        if task.inputs == "uniform":
            errata = [
                ("von Oswald et al., section 3, inputs", "The paper prints x ~ U(-1, 1); its figures are those of "
                 "U(-1/2, 1/2), this package's default. On U(-1, 1) all losses and eigenvalues would be four times "
                 "larger."),
                ("von Oswald et al., Fig. 2, loss", "The plotted loss 0.2 is half the mean squared error, though eq. 5 "
                 f"has no factor 1/2. Measured for tuned gradient descent here: MSE {2 * half:.4f}, half of it "
                 f"{half:.4f}." + (f" Exact for the best step: {exact / 2:.5f}." if exact is not None else "")),
                *errata,
            ]  # fmt: skip
        made = [
            ("training", record.get("command", "")),
            ("seeds", ", ".join(map(str, self.seeds))),
            ("trained for", f"{record.get('steps_done')} steps, {record.get('wall_time_s')} s on "
             f"{record.get('hardware')}"),
            ("versions", ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())),
            ("this page", f"mechicl report {self.study.name} --seed {self.seeds[0]} --out DIR; prompts from seed "
             f"{self.seed}"),
            ("paper", "J. von Oswald et al., Transformers learn in-context by gradient descent, ICML 2023"),
        ]  # fmt: skip
        errata_section = Section("Errata of the paper that touch this page", "", table(("where", "what"), errata))
        return [], [errata_section, Section("How it was made", "", table(("", ""), made))], {}

    compared = ("loss", "alignment", "weights", "paths", "shifts", "exact loss", "roll-out", "attention")
    """Names of the parts that compare the layer with gradient descent."""
    parts = (
        Part("loss", measured.losses), Part("alignment", measured.alignment), Part("weights", measured.weights),
        Part("paths", measured.paths), Part("shifts", measured.shifts), Part("exact loss", measured.exact_loss),
        Part("roll-out", measured.roll_outs), Part("attention", measured.attention), ALGORITHM, HEADS, FINETUNING,
        Part("provenance", provenance),
    )  # fmt: skip
