"""SmolLM2 opened by one library, in a separate process, which may have another TransformerLens."""

import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

OURS, BRIDGE, CLASS = "mechicl", "bridge of TransformerLens 4", "class of TransformerLens 3.9"
N_HEADS, N_SAMPLED = 270, 9  # of the model, and of the loop


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Opened:
    """A language model opened by one of the libraries, in this process."""

    def __init__(self, library: str, folder: str):
        torch.set_num_threads(1)
        self.library = library
        if library == OURS:
            from mechicl.models import HookedTransformer

            self.model: Any = HookedTransformer.from_pretrained_no_processing(folder)
        elif library == BRIDGE:
            from transformer_lens.model_bridge import TransformerBridge

            boot: Any = TransformerBridge.boot_transformers
            self.model = boot(folder, dtype=torch.float32)
        elif library == CLASS:
            lens_3: Any = importlib.import_module("transformer_lens")
            fields = json.loads((Path(folder) / "fields.json").read_text())
            self.model = lens_3.HookedTransformer(lens_3.HookedTransformerConfig(**fields))
            self.model.load_state_dict(load_file(Path(folder) / "lens.safetensors"), strict=False)
        else:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        ids = torch.randint(10, 40_000, (8, 32), generator=torch.Generator().manual_seed(0))
        self.ids, self.others = ids[:4], ids[4:]

    def call(self, name: str) -> float:
        """How long one of the calls takes."""
        if name == "backward":
            return seconds(lambda: self._loss().backward())
        with torch.no_grad():
            return seconds(partial(self._call, name))

    def logits(self) -> list[float]:
        with torch.no_grad():
            outputs = self.model(self.ids)
            return getattr(outputs, "logits", outputs)[0, -1, :50].tolist()

    def sweep(self, name: str) -> float:
        """How long the effects of all heads take."""
        self.ids, self.others = self.ids[:, :12], self.others[:, :12]
        if self.library == CLASS:
            return seconds(partial(self._loop, name))
        from mechicl.analysis import ablate, patch

        axes = {"layer": None, "pos": self.ids.shape[1] - 1, "head": None}
        run: Callable[..., Any] = partial(ablate, self.model, self.ids, "z", axes)
        if name == "patch":
            run = partial(patch, self.model, self.others, self.ids, "z", axes)
        return seconds(lambda: run(metrics=self._metric, progress=False))

    def _metric(self, logits: Tensor) -> Tensor:
        return logits[..., 100] if logits.ndim == 2 else logits[:, -1, 100]

    def _loss(self) -> Tensor:
        self.model.zero_grad()
        return self.model(self.ids, return_type="loss")

    def _call(self, name: str) -> Any:
        if name == "run_with_cache":
            return self.model.run_with_cache(self.ids)
        if name == "run_with_hooks":
            hooks = [(f"blocks.{layer}.attn.hook_z", lambda z, hook: 0 * z) for layer in range(self.model.cfg.n_layers)]
            return self.model.run_with_hooks(self.ids, fwd_hooks=hooks)
        return self.model(self.ids)

    def _loop(self, name: str) -> None:
        """Effects of a sample of the heads, by hooks."""
        n_layers, n_heads = self.model.cfg.n_layers, self.model.cfg.n_heads
        with torch.no_grad():
            cache = self.model.run_with_cache(self.others)[1] if name == "patch" else None
            for i in range(N_SAMPLED):
                layer, head = i * (n_layers - 1) // (N_SAMPLED - 1), i % n_heads

                def put(z: Tensor, hook: Any, head: int = head) -> Tensor:
                    z[:, -1, head] = 0 if cache is None else cache[hook.name][:, -1, head]
                    return z

                self._metric(self.model.run_with_hooks(self.ids, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", put)]))
