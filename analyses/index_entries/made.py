"""The command that makes each results file, and the checkpoints that it opens."""

from .entry import CONSTRUCTIONS, Made


def _script(name: str, *needs: str, checkpoint: str = "", more: str = "") -> Made:
    option = f" --checkpoint {checkpoint}" if checkpoint else ""
    return Made(f"python analyses/{name}.py{option}{more}", needs or (checkpoint,))


_ACTIVATIONS = ("linear", "leaky-relu-0.75", "leaky-relu-0.5", "leaky-relu-0.25", "relu", "softmax")
_LOOPED = ("lsa-2l-looped", "lsa-2l-looped-n25", "lsa-2l-looped-n50", "lsa-2l-looped-n100")
_DESCENT = ("lsa-2l-looped", "lsa-5l", "lsa-10l-looped", "lsa-12l-mlp", "lsa-1l-ln", "lsa-2l-ln")
_CONTEXTS = ("lsa-1l", "gpt2-8l")
_LAYERS = ("gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill")

MADE = {
    CONSTRUCTIONS: Made("mechicl.constructions.certificates_table()", ()),
    "oswald_one_layer_lsa-1l": _script("oswald_one_layer", "lsa-1l"),
    **{f"oswald_descent_{name}": _script("oswald_descent", checkpoint=name) for name in _DESCENT},
    "oswald_gamma": _script("oswald_gamma", *_LOOPED),
    "oswald_conditioning": _script("oswald_conditioning", *_LOOPED),
    "oswald_connectivity_lsa-5l": _script("oswald_connectivity", "lsa-5l"),
    "oswald_copying": _script("oswald_copying", "copy-2l", "copy-2l-one-hot", "copy-2l-linear"),
    "oswald_sine": _script("oswald_sine", "sine-lsa", "sine-gd"),
    "oswald_softmax": _script("oswald_softmax", "softmax-1h", "softmax-2h", "softmax-2h-sink", "lsa-1l"),
    "oswald_phases": _script("oswald_phases", "lsa-1l-phases", "lsa-1l-2h-phases", "lsa-1l-mlp-tasks8192"),
    "oswald_data_limits": _script("oswald_data_limits", *(f"lsa-1l-tasks{n}" for n in (128, 512, 2048, 8192))),
    **{f"fu_matching_{name}": _script("fu_matching", checkpoint=name) for name in _LAYERS},
    "fu_progression_gpt2-8l": _script("fu_progression", "gpt2-8l", "lstm-4l"),
    "fu_progression_gpt2-8l-ill": _script("fu_progression", checkpoint="gpt2-8l-ill", more=" --lstm None"),
    "fu_weights_gpt2-8l": _script("fu_weights", "gpt2-8l"),
    "fu_lstm": _script("fu_lstm", "gpt2-8l", "lstm-4l"),
    "fu_probes_gpt2-8l": _script("fu_probes", "gpt2-8l"),
    "icl_against_finetuning_topics-3l": _script("icl_against_finetuning", "topics-3l"),
    **{f"finetuning_on_contexts_{name}": _script("finetuning_on_contexts", checkpoint=name) for name in _CONTEXTS},
    "nertinger_table": _script("nertinger_table", *(f"nertinger-{name}" for name in _ACTIVATIONS)),
    "nertinger_order": Made("python analyses/nertinger_order.py", "every trained model that is there"),
}

UNSAVED = {
    "python analyses/benchmark.py": "speed of training, and the ratios that the repository's README quotes",
    "python analyses/benchmark_layers.py": "speed of the analyses of layers: the second part of `make bench`",
    "python analyses/benchmark_interventions.py": "speed and memory of patching: the third part of `make bench`",
    "python analyses/index.py": "this file",
    "python analyses/notebooks.py": "the five notebooks, run and saved with their outputs: `make notebooks`",
}
"""Scripts that save no results, and what they print."""

NOT_INDEXED: dict[str, str] = {}
"""Results files that no entry reads, and why."""
