"""Can the model do without interaction between context points? Trained while they are cut off from each other.

python analyses/isolated_points.py                  # trains what is missing, then measures
python analyses/isolated_points.py --no-training    # measures what was trained so far
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analyses.support.script import Option, script
from mechicl.checkpoints import load_checkpoint
from mechicl.models import HookedTransformer, build
from mechicl.models.transformer.fast import after_attention, fast_norm, join_heads, masked_softmax, queries_keys_values
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import crossed_interval
from mechicl.training import PRESETS

Arm = Literal["tuned", "scratch", "scratch-uncut", "tuned-uncut"]
ARMS: dict[Arm, str] = {
    "tuned": "fine-tuned under the cut",
    "scratch": "trained from scratch under the cut",
    "scratch-uncut": "trained from scratch without the cut (control)",
    "tuned-uncut": "fine-tuned without the cut (control)",
}


@script(
    model=Option("gpt2-8l", "checkpoint to start from, and preset of the training from scratch"),
    arms=Option(tuple(ARMS), "what to train", kind=tuple[Arm, ...]),
    seeds=Option((0, 1, 2), "seeds to train, of the checkpoint's"),
    steps=Option(7000, "of each training"),
    batch_size=Option(32, "prompts in a step"),
    runs=Option(Path("runs/isolated_points"), "folder of the trainings, which resume from their last save"),
    training=Option(True, "train what is missing"),
    compiled=Option(False, "train by compiled passes, which take three quarters of the time"),
    n_prompts=2048,
)
def compare(args: Any) -> Comparison:
    """Train the arms, and measure the losses of the query on held-out prompts with and without the cut."""
    torch.set_num_threads(1)
    checkpoint, preset = load_checkpoint(args.model), PRESETS[args.model]
    if args.training:
        for arm in args.arms:
            for seed in args.seeds:
                train_arm(args, arm, seed)
    held_out = checkpoint.task.sample(args.n_prompts, seed=10**6)
    models: dict[str, dict[int, HookedTransformer]] = {args.model: dict(enumerate(checkpoint.models))}
    data: dict[str, Any] = {"curves": {}}
    for arm, name in ARMS.items():
        for seed in args.seeds:
            if (path := _path(args, arm, seed)).is_file():
                saved = torch.load(path, weights_only=True)
                model = build(preset.model, seed).eval()
                model.load_state_dict(saved["weights"])
                models.setdefault(name, {})[seed] = model
                data["curves"].setdefault(arm, {})[str(seed)] = saved["curve"]
    rows = []
    power = held_out.ys[:, -1].square().mean().item()
    for name, by_seed in models.items():
        for cut in (False, True):
            errors = torch.stack([query_errors(model, held_out, cut=cut) for model in by_seed.values()])
            quantity = f"{name}: loss of the query, context points {'cut off from each other' if cut else 'connected'}"
            losses = zip(by_seed, errors.mean(1).tolist(), strict=True)
            by = ", ".join(f"seed {seed} {error:.5f}" for seed, error in losses)
            value: Any = crossed_interval(errors) if len(by_seed) > 1 else errors.mean().item()
            rows.append(Row(quantity, None, value, "", f"{by}; {100 * errors.mean().item() / power:.3f}% of E y²"))
    lead = (
        f"Squared error of the query on {args.n_prompts} held-out prompts, intervals over seeds and prompts. Cut off: "
        f"in all layers each context point reads only its own two tokens, and the query reads all. Steps of "
        f"{args.batch_size} prompts: {args.steps} for training on, {args.steps} from scratch."
    )
    return Comparison(f"{args.model} without interaction of context points", lead, rows, [], data)


# ---- passes ----


def visible_keys(n: int, *, cut: bool) -> Bool[Tensor, "pos key"]:
    """Return what reads what: two tokens for each of n points, then a query for each prefix of 0 to n points."""
    point = torch.arange(2 * n) // 2
    causal = torch.ones(2 * n, 2 * n, dtype=torch.bool).tril()
    context = causal & (point[:, None] == point) if cut else causal
    queries = torch.arange(n + 1)[:, None] > point
    upper = torch.cat([context, torch.zeros(2 * n, n + 1, dtype=torch.bool)], 1)
    return torch.cat([upper, torch.cat([queries, torch.eye(n + 1, dtype=torch.bool)], 1)])


def through_blocks(
    model: HookedTransformer, stream: Float[Tensor, "prompt pos d_model"], visible: Bool[Tensor, "pos key"]
) -> Float[Tensor, "prompt pos d_model"]:
    """Compute the stream after the last layer, where each position reads what is visible to it."""
    for block in model.blocks:
        q, k, v = queries_keys_values(block.attn, fast_norm(block.ln1, stream), "QKV")
        z = masked_softmax(q, k, visible, model.cfg.score_scale) @ v
        stream = after_attention(block, stream + join_heads(z, block.attn.W_O) + block.attn.b_O)
    return stream


def predict_prefixes(
    model: HookedTransformer, prompts: Prompts, *, cut: bool, blocks: Callable[..., Tensor] = through_blocks
) -> Float[Tensor, "prompt point y"]:
    """Predict every point from those before it, while context points read only themselves if `cut`.

    Each input is a context token, and again a separate token, the query that reads the prefix before it: one token
    could not be both a query, which reads all, and a context point, which reads nothing.
    """
    stream = model(model.encode(prompts), stop_at_layer=0)
    stream = torch.cat([stream[:, :-1], stream[:, 0::2]], 1)
    stream = blocks(model, stream, visible_keys(prompts.n_context, cut=cut))
    return model(stream[:, 2 * prompts.n_context :], start_at_layer=model.cfg.n_layers)


@torch.no_grad()
def query_errors(model: HookedTransformer, prompts: Prompts, *, cut: bool) -> Float[Tensor, "prompt"]:
    parts = [prompts[start : start + 512] for start in range(0, len(prompts), 512)]
    return torch.cat([(predict_prefixes(model, part, cut=cut) - part.ys)[:, -1].square().sum(-1) for part in parts])


# ---- training ----


def _path(args: Any, arm: Arm, seed: int) -> Path:
    return args.runs / f"{args.model}-{arm}-{seed}.pt"


def train_arm(args: Any, arm: Arm, seed: int) -> None:
    """Train one arm and seed by Adam on the mean squared error of all points, resuming from its last save.

    From scratch, the learning rate is the preset's, and its curriculum is 2.5 times as fast.
    """
    config, steps, cut = PRESETS[args.model], args.steps, not arm.endswith("uncut")
    scratch = arm.startswith("scratch")
    rate, warm_up = (config.learning_rate, 400) if scratch else (5e-4, 100)
    model = build(config.model, seed) if scratch else load_checkpoint(args.model).models[seed]
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    held_out = config.task.sample(2000, seed=config.eval_seed)
    first, curve, seconds, path = 0, [], 0.0, _path(args, arm, seed)
    blocks = torch.compile(through_blocks, dynamic=False) if args.compiled else through_blocks
    if path.is_file():
        saved = torch.load(path, weights_only=True)
        first, curve, seconds = saved["step"], saved["curve"], saved["seconds"]
        model.load_state_dict(saved["weights"])
        if first < steps:
            optimizer.load_state_dict(saved["optimizer"])
    started = time.perf_counter() - seconds
    for step in range(first, steps + 1):
        if (step % 200 == 0 and step > first) or step == steps or not curve:
            curve.append([step, query_errors(model, held_out, cut=cut).mean().item()])
            seconds = time.perf_counter() - started
            state = {"step": step, "curve": curve, "seconds": seconds, "weights": model.state_dict()}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "optimizer": optimizer.state_dict()}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            print(f"{arm}, seed {seed}, step {step}: {curve[-1][1]:.5f} ({seconds:.0f} s)", flush=True)
        if step == steps:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
        task: Any = config.task
        if scratch and config.curriculum is not None:  # whole prompts from step 1200 on
            task = config.curriculum.task_at(task, int(2.5 * step))
        prompts = task.sample(args.batch_size, seed=2**33 + 10**6 * seed + step)
        # without the cut, the inputs of later points are the queries: the same numbers from two thirds of the tokens
        if cut:
            predictions = predict_prefixes(model, prompts, cut=True, blocks=blocks)
        else:
            predictions = model.decode(model(model.encode(prompts)))
        loss = (predictions - prompts.ys).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    compare.run()
